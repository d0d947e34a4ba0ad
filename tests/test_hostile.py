"""Files that somebody else has made: refused in one line, or read; never followed
elsewhere, never obeyed.
"""

import hashlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.hostile import commands, fuzz, mutations, publishing
from benchmarks.hostile.cases import CASES
from benchmarks.hostile.readers import FILES
from hpcfed import cli
from hpcfed.errors import UserError
from hpcfed.results import checkpoints, safe, sandbox
from hpcfed.results.as_json import parsed, run_summary
from hpcfed.results.folder import check_plain, checkpoint_folder
from hpcfed.results.publish import publish
from hpcfed.results.stored import read_run
from hpcfed.results.study import copy_run
from tests.runs import mistake, started

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("originals")
    fuzz.make_originals(folder)
    return folder


@pytest.fixture
def run(originals: Path, tmp_path: Path) -> Path:
    """A run to do harm to."""
    (tmp_path / "run").mkdir()
    shutil.copy(originals / "run.h5", tmp_path / "run/run.h5")
    return tmp_path / "run"


def test_hundreds_of_changed_files(originals: Path) -> None:
    """A short form of the benchmark: all kinds of changes to all kinds of HDF5 files,
    and all other cases.
    """
    files = fuzz.campaign(
        originals, len(mutations.KINDS) * len(FILES), seed=1, kinds=mutations.KINDS
    )
    others = fuzz.campaign(originals, len(CASES), seed=1, kinds=tuple(CASES))
    for table, kinds in ((files, mutations.KINDS), (others, CASES)):
        total = sum(table.values(), Counter())
        assert set(table) == set(kinds)
        assert set(total) == {"read fine", "refused in one line"}, total
        assert min(total.values()) > len(kinds) / 4, total


@pytest.mark.parametrize(
    ("code", "out", "err", "outcome"),
    [
        (0, "status: complete\n", "", "read fine"),
        (2, "", "hpcfed: no such folder: x\n", "refused in one line"),
        (
            2,
            "",
            "hpcfed: left out: x\nhpcfed: there is no run\n",
            "refused in one line",
        ),
        (2, "", "hpcfed: this\nand that\n", "many lines"),
        (2, "", "hpcfed: this\nhpcfed: that\n", "many lines"),
        (1, "", "Traceback (most recent call last):\n", "tracebacks"),
        (75, "", "", "tracebacks"),
        (0, "a\x1b[2Jb\n", "", "raw escapes"),
        (2, "", "hpcfed: a\x9bb\n", "raw escapes"),
    ],
)
def test_what_a_command_has_said_is_judged(
    code: int, out: str, err: str, outcome: str
) -> None:
    assert commands.judge(code, out, err)[0] == outcome


def external_link(file: h5py.File, outside: Path) -> None:
    del file["config"]
    file["config"] = h5py.ExternalLink(str(outside), "/config")


def external_link_nearby(file: h5py.File, outside: Path) -> None:
    file["rounds/more"] = h5py.ExternalLink(str(outside), "/config")


def external_storage(file: h5py.File, outside: Path) -> None:
    shape = file["clients/train_samples"].shape
    del file["clients/train_samples"]
    file.create_dataset(
        "clients/train_samples",
        shape,
        "u1",
        external=[(str(outside), 0, h5py.h5f.UNLIMITED)],
    )


def virtual_dataset(file: h5py.File, outside: Path) -> None:
    shape = file["rounds/seconds"].shape
    del file["rounds/seconds"]
    layout = h5py.VirtualLayout(shape, "f8")
    layout[...] = h5py.VirtualSource(str(outside), "rounds/seconds", shape)
    file.create_virtual_dataset("rounds/seconds", layout)


def packed(file: h5py.File, outside: Path) -> None:
    del file["rounds/seconds"]
    file.create_dataset("rounds/seconds", data=np.ones(3), compression="gzip")


REFUSED: dict[Callable[[h5py.File, Path], None], str] = {
    external_link: "/config is a link to another file",
    external_link_nearby: "/rounds/more is a link to another file",
    external_storage: "/clients/train_samples keeps its numbers in another file",
    virtual_dataset: "/rounds/seconds is a virtual dataset",
    packed: "/rounds/seconds is packed",
}


@pytest.mark.parametrize("harm", REFUSED, ids=lambda harm: harm.__name__)
def test_what_leads_out_of_a_file_is_refused_by_name(
    harm: Callable[[h5py.File, Path], None],
    originals: Path,
    run: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By show and resume with exit code 2; report names it, leaves it out, and ends
    with 1.
    """
    with h5py.File(run / "run.h5", "r+") as file:
        harm(file, originals / "run.h5")
    for words in (["show", run], ["show", run, "--json"], ["run", "--resume", run]):
        assert REFUSED[harm] in mistake(capsys, *words)
    with pytest.raises(SystemExit) as ended:
        cli.main(
            [
                "report",
                str(run),
                str(originals / "study.h5"),
                "--out",
                str(run.parent / "page.html"),
            ]
        )
    said = capsys.readouterr().err
    assert ended.value.code == 1 and said.count("\n") == 1
    assert (
        "left out: " in said and REFUSED[harm] in said and str(run / "run.h5") in said
    )
    assert (run.parent / "page.html").exists()


def test_a_study_with_a_link_is_refused(
    originals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(originals / "study.h5", tmp_path)
    with h5py.File(tmp_path / "study.h5", "r+") as file:
        del file["runs/00001"]
        file["runs/00001"] = h5py.ExternalLink(str(originals / "run.h5"), "/")
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")])
    assert ended.value.code == 2
    assert "/runs/00001 is a link to another file" in capsys.readouterr().err


def test_soft_links_and_circles_do_no_harm(run: Path) -> None:
    before = run_summary(read_run(run))
    with h5py.File(run / "run.h5", "r+") as file:
        file["rounds/self"] = file["rounds"]
        file["top"] = file["/"]
        file["nowhere"] = h5py.SoftLink("/not/there")
        file["round and round"] = h5py.SoftLink("/round and round")
        file.move("config", "elsewhere")
        file["config"] = h5py.SoftLink("/top/top/elsewhere")
    sandbox.try_out([run / "run.h5"])
    assert json.dumps(run_summary(read_run(run))) == json.dumps(before)


@pytest.mark.parametrize(
    "what", ["rounds", "dataset", "text", "strings", "attribute", "depth"]
)
def test_what_is_declared_and_not_there_takes_no_memory(
    what: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a process that may take half a GiB more than it has."""
    with h5py.File(run / "run.h5", "r+") as file:
        if what in ("rounds", "dataset"):
            names = [
                name
                for name in mutations.items(file, h5py.Dataset)
                if file[name].dims and file[name].dims[0].label == "round"
            ]
            for name in names if what == "rounds" else ["rounds/accuracy"]:
                shape, dtype = file[name].shape, file[name].dtype
                del file[name]
                file.create_dataset(
                    name,
                    (2**40, *shape[1:]),
                    dtype,
                    chunks=(1024, *shape[1:]),
                    fillvalue=1,
                )
            config = json.loads(file["config"].asstr()[()])
            del file["config"]
            file["config"] = json.dumps(
                config | {"rounds": 2**40 if what == "rounds" else 3}
            )
            file.attrs["rounds_done"] = 2**40 if what == "rounds" else 3
        elif what == "text":
            del file["environment"]
            file.create_dataset("environment", (), "S2000000000")
        elif what == "strings":
            del file["server/phase_names"]
            file.create_dataset(
                "server/phase_names", (2**40,), h5py.string_dtype(), chunks=(1024,)
            )
        elif what == "attribute":
            for number in range(2000):
                file.attrs[f"more {number}"] = number
        else:
            group = file
            for _ in range(5000):
                group = group.create_group("x")
    program = (
        "import resource, sys\nfrom hpcfed import cli\nimport hpcfed.results.stored, "
        "rich.console, h5py\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size + 2**29, size + 2**29))\n"
        "cli.main(['show', sys.argv[1]])\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, run],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.count("\n") == 1 and "cannot be read as a run: " in ended.stderr
    assert not re.search("memory|alloc", ended.stderr, re.IGNORECASE), (
        "it was refused before it was tried"
    )


def test_changed_numbers_are_noticed(run: Path) -> None:
    """Every number of a run's rounds and clients has a checksum."""
    with h5py.File(run / "run.h5") as file:
        data = file["rounds/train_loss"]
        place = data.id.get_chunk_info(0).byte_offset
        plain = [
            n
            for n in mutations.items(file, h5py.Dataset)
            if file[n].dtype.kind in "fiu" and file[n].shape and not file[n].fletcher32
        ]
    assert plain == []
    content = bytearray((run / "run.h5").read_bytes())
    content[place + 3] ^= 1
    (run / "run.h5").write_bytes(content)
    with pytest.raises(
        UserError, match=r"cannot be read as a run: .*checksum|read data|filter"
    ):
        read_run(run)


def test_files_without_checksums_are_still_read(run: Path) -> None:
    """Earlier versions wrote such files."""
    before = run_summary(read_run(run))
    with h5py.File(run / "run.h5", "r+") as file:
        for name in mutations.items(file, h5py.Dataset):
            if file[name].fletcher32:
                values, attributes = file[name][()], dict(file[name].attrs)
                del file[name]
                file[name] = values
                file[name].attrs.update(attributes)
    assert json.dumps(run_summary(read_run(run))) == json.dumps(before)


def test_a_library_that_loops_or_crashes_is_one_line(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "PATIENCE", 1)
    monkeypatch.setattr(
        safe, "_check_dataset", lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    )
    with pytest.raises(
        UserError, match=r"run\.h5 is damaged: the HDF5 library crashes over it"
    ):
        sandbox.try_out([run / "run.h5"])

    def loop(*_: object) -> None:
        while True:
            pass

    monkeypatch.setattr(safe, "_check_dataset", loop)
    with pytest.raises(
        UserError, match=r"run\.h5 is damaged: the HDF5 library takes too long with it"
    ):
        sandbox.try_out([run / "run.h5"])


def test_what_this_process_has_written_or_tried_is_not_tried_again(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = run / "run.h5"
    tried: list[Path] = []
    monkeypatch.setattr(sandbox, "_in_child", lambda path: tried.append(path) or 0)
    few = "--dataset synthetic --synthetic-shape 1x4x4 --train-per-client 4"
    sizes = f"{few} --test-per-client 2 --model mlp --clients 2 --rounds 1"
    started(*sizes.split(), "--out", tmp_path / "written")
    sandbox.try_out([tmp_path / "written/run.h5"])
    assert tried == []
    sandbox.try_out([file, file])
    assert tried == [file]
    # Another content of the same size and time is another file.
    times = file.stat()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    sandbox.try_out([file])
    assert tried == [file, file]
    monkeypatch.setattr(sandbox, "_in_child", lambda path: -signal.SIGKILL)
    content[-1] ^= 2
    file.write_bytes(content)
    for _ in range(2):
        with pytest.raises(UserError, match="crashes over it"):
            sandbox.try_out([file])


def test_zeros_in_a_heap_of_strings_are_refused_at_once(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libhdf5 2.0.0 would never return. A study and a resumed run do not try files."""
    content = bytearray((run / "run.h5").read_bytes())
    place = content.find(b"GCOL") + 16
    content[place : place + 64] = bytes(64)
    (run / "run.h5").write_bytes(content)
    with pytest.raises(
        UserError, match="a heap of strings has an entry without a size"
    ):
        sandbox.try_out([run / "run.h5"])
    monkeypatch.setattr(h5py, "File", lambda *_: pytest.fail("it was opened"))
    with pytest.raises(UserError, match="a heap of strings has an entry"):
        read_run(run)
    gathered: Any = {}
    copy_run(run / "run.h5", gathered, 0)


def stored_config(run: Path, **changes: Any) -> None:
    with h5py.File(run / "run.h5", "r+") as file:
        config = json.loads(file["config"].asstr()[()]) | changes
        del file["config"]
        file["config"] = json.dumps(config)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"method": "os.system"}, "unknown method 'os.system'"),
        ({"method": "../../evil"}, "../../evil"),
        ({"method": "RUN/evil.py"}, "does not run code that comes with results"),
        ({"model": "RUN/evil.py:Net"}, "does not run code that comes with results"),
        ({"dataset": "RUN/evil.py:data"}, "does not run code that comes with results"),
        ({"rounds": "__import__('os')"}, "option rounds"),
        ({"epochs": -1}, "option epochs"),
        ({"server_load": "/nowhere/x.h5"}, "/nowhere/x.h5: no such file"),
        ({"dataset": "file:/nowhere/x.npz"}, "/nowhere/x.npz"),
        ({"dataset": "cifar10", "data_root": "/nowhere"}, "/nowhere"),
        ({"evil": 1}, "evil: unknown option"),
        ({"server_width": "x"}, "server_width"),
    ],
)
def test_what_a_run_is_resumed_with_is_checked_like_a_command_line(
    changes: dict[str, Any],
    expected: str,
    run: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (run / "evil.py").write_text("raise SystemExit('it ran')")
    for name, value in changes.items():
        if isinstance(value, str):
            changes = changes | {name: value.replace("RUN", str(run))}
    stored_config(run, **changes)
    with h5py.File(run / "run.h5", "r+") as file:
        # One that is complete needs nothing any more.
        file.attrs.update(status="stopped", rounds_done=0)
    assert expected in mistake(capsys, "run", "--resume", run)


EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&"


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_names_on_the_page_are_no_tags(originals: Path, tmp_path: Path) -> None:
    """Names, notes and commands of a run and of a study: the page has the tags and
    attributes of an honest one.
    """
    pages = {}
    for kind in ("honest", "evil"):
        folder = tmp_path / kind
        folder.mkdir()
        shutil.copy(originals / "study.h5", folder)
        (folder / "run").mkdir()
        shutil.copy(originals / "run.h5", folder / "run")
        if kind == "evil":
            with h5py.File(folder / "study.h5", "r+") as file:
                file.attrs["title"] = EVIL
                for name in ("trials/name", "trials/command", "trials/error", "study"):
                    values = file[name].asstr()[()]
                    del file[name]
                    file[name] = (
                        EVIL
                        if isinstance(values, str)
                        else np.array([EVIL] * len(values), h5py.string_dtype())
                    )
                _spoil(file["runs/00000/seed-0"])
            with h5py.File(folder / "run/run.h5", "r+") as file:
                _spoil(file)
        words = [
            "report",
            str(folder / "study.h5"),
            str(folder / "run"),
            "--out",
            str(folder / "page.html"),
        ]
        cli.main(words)
        pages[kind] = (folder / "page.html").read_text()
    evil, honest = Tags(), Tags()
    evil.feed(pages["evil"])
    honest.feed(pages["honest"])
    assert evil.found == honest.found and evil.attributes == honest.attributes
    # The library that draws charts has some of its own.
    for tag in ("<script", "<img"):
        assert pages["evil"].count(tag) == pages["honest"].count(tag)
    assert pages["evil"].count("&lt;script&gt;") > 10


def _spoil(file: h5py.Group) -> None:
    for name in ("method", "dataset", "model", "started"):
        file.attrs[name] = EVIL
    for name in ("config", "environment"):
        content = json.loads(file[name].asstr()[()])
        content |= {
            "method": EVIL,
            "partition": EVIL,
            "command": ["hpcfed", EVIL],
            "launcher": EVIL,
        }
        if name == "environment":
            content["backend"] = EVIL
        content["ranks"] = [{"host": EVIL, "device": EVIL}]
        del file[name]
        file[name] = json.dumps(content)
    if "server/phase_names" in file:
        values = [EVIL, *file["server/phase_names"].asstr()[1:]]
        del file["server/phase_names"]
        file["server/phase_names"] = np.array(values, h5py.string_dtype())


def test_a_terminal_is_not_given_orders(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with h5py.File(run / "run.h5", "r+") as file:
        file.attrs["dataset"] = "\x1b]0;owned\x07[red]digits\r\n"
        file["newcomers/start"][...] = ["[/bold]", "\x1b[2J", "[link=x]", "[/]"]
    cli.main(["show", str(run)])
    said = capsys.readouterr().out
    assert (
        "\x1b" not in said
        and "\r" not in said
        and "[red]digits" in said
        and "[/bold]" in said
    )


@pytest.mark.skipif(
    np.dtype(np.longdouble).itemsize == 8, reason="this machine has no longer numbers"
)
@pytest.mark.parametrize("where", ["attribute", "dataset"])
def test_longer_numbers_are_refused(run: Path, where: str) -> None:
    """JSON knows none, nor does anything else that a record goes to."""
    with h5py.File(run / "run.h5", "r+") as file:
        if where == "attribute":
            file.attrs["seed"] = np.longdouble(0)
        else:
            values = file["rounds/seconds"][()].astype(np.longdouble)
            del file["rounds/seconds"]
            file["rounds/seconds"] = values
    with pytest.raises(UserError, match=r"not (a number|hold numbers)"):
        read_run(run)


@pytest.mark.parametrize(
    "name", ["uploads", "privacy", "noise_multiplier", "delta", "resumed"]
)
def test_facts_of_the_way_have_their_kind(run: Path, name: str) -> None:
    """They are printed, or compared with."""
    with h5py.File(run / "run.h5", "r+") as file:
        file.attrs[name] = np.array([[1, 2]])
    with pytest.raises(UserError, match=f"its {name} is no"):
        read_run(run)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = checkpoint_folder(tmp_path, 3)
    folder.mkdir(parents=True)
    checkpoints.complete(
        folder, 3, [checkpoints.write(folder, "common.w", np.arange(4.0))]
    )
    assert checkpoints.newest(tmp_path, say=pytest.fail) is not None
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "../outside.npy",
        "/{}",
        "common.w.npy/../../outside.npy",
        "..",
        "",
        ".hidden.npy",
    ],
)
def test_a_marker_that_names_other_files_is_refused(
    name: str, checkpoint: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside.npy"
    shutil.copy(checkpoint / "common.w.npy", outside)
    shutil.copy(outside, checkpoint.parent / "outside.npy")
    shutil.copy(outside, checkpoint / ".hidden.npy")
    marker = json.loads((checkpoint / checkpoints.MARKER).read_text())
    marker["parts"][0]["name"] = f"{outside}" if name == "/{}" else name
    (checkpoint / checkpoints.MARKER).write_text(json.dumps(marker))
    said: list[str] = []
    assert checkpoints.newest(tmp_path, say=said.append) is None
    assert (
        len(said) == 1 and "is damaged" in said[0] and "is not a file's name" in said[0]
    )


@pytest.mark.parametrize(
    "what", ["part", "marker", "folder", "round", "header", "object", "unlisted"]
)
def test_other_tricks_of_a_checkpoint(
    what: str, checkpoint: Path, tmp_path: Path
) -> None:
    aside, part = tmp_path / "aside", checkpoint / "common.w.npy"
    said: list[str] = []
    if what in ("part", "marker", "folder"):
        victim = {
            "part": part,
            "marker": checkpoint / checkpoints.MARKER,
            "folder": checkpoint,
        }[what]
        victim.rename(aside)
        victim.symlink_to(aside)
    elif what == "round":
        checkpoint.rename(checkpoint.with_name("00000009"))
    elif what == "unlisted":
        (checkpoint / "server-0.bank-1.rows.npy").write_bytes(b"x")
        assert checkpoints.listed(checkpoint) == ["common.w.npy"]
        return
    else:
        header = (
            b"{'descr': '<f8', 'fortran_order': False, 'shape': (1099511627776,), }"
        )
        header = (
            header
            if what == "header"
            else header.replace(b"<f8", b"|O").replace(b"1099511627776", b"1")
        )
        header += b" " * (118 - len(header) - 1) + b"\n"
        part.write_bytes(
            b"\x93NUMPY\x01\x00"
            + len(header).to_bytes(2, "little")
            + header
            + b"cos\nsystem\n."
        )
        checkpoints.complete(checkpoint, 3, [checkpoints.existing(part)])
        found = checkpoints.newest(tmp_path, say=said.append)
        assert found is not None
        with pytest.raises(UserError, match="not an array of numbers of its size"):
            found.read("common.w", np.float64, [1099511627776])
        return
    assert checkpoints.newest(tmp_path, say=said.append) is None
    if what == "folder":
        with pytest.raises(UserError, match="is a link, which is not followed"):
            check_plain(tmp_path)
    else:
        assert len(said) == 1 and re.search("link|plain file|of round", said[0])


def test_json_has_an_end() -> None:
    assert parsed('{"a": [[{"b": 1}]]}') == {"a": [[{"b": 1}]]}
    for depth in (40, 900, 100_000):
        with pytest.raises(ValueError, match="nested too deeply"):
            parsed('{"a": ' + "[" * depth + "]" * depth + "}")


def test_a_linked_folder_of_checkpoints_is_refused(
    checkpoint: Path, tmp_path: Path
) -> None:
    checkpoint.parent.rename(tmp_path / "aside")
    (tmp_path / "checkpoints").symlink_to(tmp_path / "aside")
    with pytest.raises(UserError, match="is a link"):
        checkpoints.newest(tmp_path, say=pytest.fail)


def test_no_pickle_is_ever_loaded() -> None:
    """But for CIFAR's own files, which are known by their checksums."""
    for path in (ROOT / "hpcfed").rglob("*.py"):
        text = path.read_text()
        if path.parts[-2:] == ("data", "loading.py"):
            text = text.replace("import pickle", "")
        assert not re.search(
            r"\b(torch\.load|pickle\.loads?|import pickle|allow_pickle=True|eval\(|exec\()\b",
            text,
        ), path
        for call in re.findall(r"np\.load\([^\n]*", text):
            assert "allow_pickle=False" in call, (path, call)


def test_killed_while_publishing(tmp_path: Path) -> None:
    """A short form of the benchmark."""
    figures = publishing.campaign(tmp_path, 25, seed=2)
    assert (
        figures["kills"] == 25 and figures["reads"] > 100 and figures["versions"] > 25
    )
    assert (figures["torn"], figures["older than told"], figures["left behind"]) == (
        0,
        0,
        0,
    )


def test_what_a_killed_publisher_left_is_removed_and_others_are_not(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x"
    publish(b"old", path)
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
    gone.wait()
    own = f".x.{socket.gethostname()}."
    for name in (
        f"{own}{gone.pid}.tmp",
        f"{own}{os.getppid()}.tmp",
        f".x.elsewhere.{gone.pid}.tmp",
        f"{own}y.tmp",
    ):
        (tmp_path / name).write_bytes(b"part")
    publish(b"new", path)
    assert path.read_bytes() == b"new"
    left = {
        f"{own}{os.getppid()}.tmp",
        f".x.elsewhere.{gone.pid}.tmp",
        f"{own}y.tmp",
        "x",
    }
    assert set(os.listdir(tmp_path)) == left


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_any_config_in_a_file_is_a_run_or_one_line(
    run: Path, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    """Whatever JSON values stand in it."""
    # Forks that try the file out are what takes longest, and are tested above.
    monkeypatch.setattr(sandbox, "_in_child", lambda _: 0)
    with h5py.File(run / "run.h5", "r+") as file:
        original = file["config"].asstr()[()]
        config = json.loads(original)
        keys = st.sampled_from(sorted(config)) | st.text(max_size=5)
        config |= data.draw(st.dictionaries(keys, VALUES, max_size=3))
        del file["config"]
        file["config"] = json.dumps(config)
    try:
        json.dumps(run_summary(read_run(run)))
        cli.parse_run(["--resume", str(run)])
    except UserError as error:
        assert str(error)
    finally:
        with h5py.File(run / "run.h5", "r+") as file:
            del file["config"]
            file["config"] = original


@settings(
    max_examples=14,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.sampled_from(mutations.KINDS), st.integers(0, 2**32))
def test_the_same_seed_makes_the_same_file(
    originals: Path, tmp_path: Path, kind: str, seed: int
) -> None:
    """So that what a campaign has found can be looked at again."""
    digests = set()
    for _ in range(2):
        mutations.mutate(
            originals / "params.h5", tmp_path / "x.h5", kind, random.Random(seed)
        )
        if kind in mutations.BYTES:
            digests.add(hashlib.sha256((tmp_path / "x.h5").read_bytes()).hexdigest())
        else:
            with h5py.File(tmp_path / "x.h5") as file:
                names = mutations.items(file)
                digests.add(repr([(name, [*file[name].attrs]) for name in names]))
    assert len(digests) == 1
