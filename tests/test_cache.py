"""The user's cache: entries come back whole and our own, or not at all."""

import gc
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from hpcfed.kernels import cuda, nvrtc
from hpcfed.runtime import cache, imports


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, which is not there yet."""
    path = tmp_path / "cache"
    monkeypatch.setenv(cache.VARIABLE, str(path))
    return path


def test_a_folder_that_others_share_is_neither_used_nor_closed_to_them(
    folder: Path,
) -> None:
    folder.mkdir()
    folder.chmod(0o775)
    cache.write("a", b"first")
    assert folder.stat().st_mode & 0o777 == 0o775
    assert not os.listdir(folder)


def test_an_entry_comes_back_and_is_the_users_alone(folder: Path) -> None:
    assert cache.read("a") is None
    cache.write("a", b"first")
    cache.write("a", b"second")
    assert cache.read("a") == b"second"
    assert os.listdir(folder) == ["a"], "no temporary file is left"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "a").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "rename"])
def test_a_damaged_entry_is_none(folder: Path, damage: str) -> None:
    cache.write("a", b"content")
    file = folder / "a"
    whole = file.read_bytes()
    if damage == "flip":
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif damage == "cut":
        file.write_bytes(whole[:-1])
    elif damage == "empty":
        file.write_bytes(b"")
    else:
        file.rename(folder / "b")
    assert cache.read("b" if damage == "rename" else "a") is None
    cache.write("a", b"content")
    assert cache.read("a") == b"content"


def test_what_others_can_write_is_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write("a", b"content")
    (folder / "a").chmod(0o620)
    assert cache.read("a") is None, "a file that the group can write"
    (folder / "a").chmod(0o600)
    folder.chmod(0o770)
    assert cache.read("a") is None, "a folder that the group can write"
    folder.chmod(0o700)
    assert cache.read("a") == b"content"
    someone = os.geteuid() + 1
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: someone)
        assert cache.read("a") is None, "another user's folder"
        cache.write("a", b"theirs")
    assert cache.read("a") == b"content"


def test_links_and_pipes_are_not_read(folder: Path) -> None:
    cache.write("a", b"content")
    (folder / "a").rename(folder.parent / "elsewhere")
    (folder / "a").symlink_to(folder.parent / "elsewhere")
    os.mkfifo(folder / "pipe", 0o600)
    assert cache.read("a") is None
    assert cache.read("pipe") is None


def test_nothing_is_kept_where_the_user_wants_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(cache.VARIABLE, "off")
    cache.write("a", b"content")
    assert cache.read("a") is None
    assert not list(tmp_path.iterdir())
    monkeypatch.delenv(cache.VARIABLE)
    assert cache.folder() == tmp_path / "hpcfed"


def test_the_folder_is_the_same_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that changes its folder keeps its cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(cache.VARIABLE, "kept")
    assert cache.folder() == tmp_path / "kept"
    monkeypatch.delenv(cache.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder() == tmp_path / ".cache" / "hpcfed"


def test_a_cache_that_cannot_be_written_costs_nothing_else(
    folder: Path,
) -> None:
    folder.write_text("a file where the folder should be")
    cache.write("a", b"content")
    assert cache.read("a") is None


def test_the_oldest_entries_go_when_there_are_too_many(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for age, name in enumerate("dcba"):
        cache.write(name, bytes(100))
        os.utime(folder / name, (1000 - age, 1000 - age))
    # Five entries of 132 bytes are beyond the limit; half of it holds two.
    monkeypatch.setattr(cache, "MOST_BYTES", 5 * 132 - 1)
    cache.write("e", bytes(100))
    assert sorted(os.listdir(folder)) == ["d", "e"]


def test_a_kernel_is_compiled_once_for_each_source_and_device(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="no CUDA compiler beside torch")
    compiled = []

    def compile(source: str, text: str, options: list[str]) -> bytes:
        compiled.append(options[0])
        return source.encode()

    monkeypatch.setattr(nvrtc, "compile", compile)
    # Without what this process remembers, as a new process would.
    fresh = cuda.compiled.__wrapped__
    macros = (("WIDTH", 4),)
    for _ in range(2):
        assert fresh("sgd.cu", macros, "sm_80") == b"sgd.cu"
    fresh("sgd.cu", macros, "sm_90a")
    fresh("sgd.cu", (("WIDTH", 8),), "sm_80")
    fresh("adam.cu", macros, "sm_80")
    monkeypatch.setattr(cuda.torch, "__version__", "another")
    fresh("sgd.cu", macros, "sm_80")
    assert compiled == ["-arch=" + name for name in ("sm_80", "sm_90a", *["sm_80"] * 3)]
    for entry in folder.iterdir():
        entry.write_bytes(b"damaged")
    fresh("sgd.cu", macros, "sm_80")
    assert len(compiled) == 6


@pytest.mark.parametrize("package", imports.REPRESENTATIVES)
def test_compiled_python_is_kept_where_nobody_else_keeps_it(
    package: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = {}
    for name in imports.REPRESENTATIVES:
        path = tmp_path / name / "__pycache__/__init__.pyc"
        path.parent.mkdir(parents=True)
        path.touch()
        specs[name] = ModuleSpec(name, None)
        specs[name].cached = str(path)
    compiled = tmp_path / package / "__pycache__/__init__.pyc"
    compiled.unlink()
    monkeypatch.setattr(imports, "find_spec", specs.get)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    imports.keep_bytecode()
    assert sys.pycache_prefix is None, "Python will write beside it"
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    compiled.touch()
    imports.keep_bytecode()
    assert sys.pycache_prefix is None, "it is there already"
    compiled.unlink()
    imports.keep_bytecode()
    assert sys.pycache_prefix == str(folder / "bytecode")
    assert not sys.dont_write_bytecode
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (folder / "bytecode").chmod(0o770)
    imports.keep_bytecode()
    assert sys.pycache_prefix is None, "others could put code there"


def test_garbage_is_collected_again_after_imports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    before = gc.get_freeze_count()
    with pytest.raises(ZeroDivisionError), imports.without_collecting():
        assert not gc.isenabled()
        1 / 0  # noqa: B018
    assert gc.isenabled()
    assert gc.get_freeze_count() > before
    gc.unfreeze()
