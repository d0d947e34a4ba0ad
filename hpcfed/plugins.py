"""Python code that users bring: an object in their own file, in a package, or in an
installed plugin.

Networks, data sets and methods are named alike:
- `FILE.py:NAME`, an object in a file; the file may import others beside it.
- `package.module:NAME`, an object in an installed package.
- `name`, if an installed package announces it as an entry point of `hpcfed.models`,
  `hpcfed.datasets` or `hpcfed.methods`.
- `notebook:NAME`, an object that a program or a notebook has passed in.

Any failure in such code is reported to its author in one line, never as our traceback.
"""

import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from hpcfed.errors import UserError, did_you_mean, one_line, shown

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_FILE = "hpcfed_file_"
"""Prefix for the names of modules made from files."""
_loaded: dict[Path, str] = {}
"""Files imported by path, and what they imported beside them, with checksums."""
_named: set[Path] = set()
"""The files among them that were named themselves."""
_folders: list[str] = []
"""Their folders that were added to Python's path, newest first."""
_packaged: dict[str, dict[str, str]] = {}
"""Modules of packages and entry points that were named: checksums of their files."""
NOTEBOOK = "notebook"
_given: dict[str, dict[str, Any]] = {}
"""Objects that a program or a notebook has passed in, by name and kind."""
_sources: dict[tuple[str, str], str] = {}
"""What stands for their source, where that is no longer to be found."""
_handed_in: dict[str, Any] = {}
"""Objects of files that a program has passed in, by FILE.py or FILE.py:NAME."""


def are_used() -> bool:
    """Tell whether this process has loaded code that users brought."""
    return bool(_loaded or _packaged or _given)


def is_reference(text: str) -> bool:
    """Tell whether a name is FILE.py:NAME or package.module:NAME."""
    where, colon, name = text.rpartition(":")
    if not colon or not name.isidentifier():
        return False
    return where.endswith(".py") or _MODULE.fullmatch(where) is not None


def is_file(text: str) -> bool:
    """Tell whether a name refers to a Python file."""
    return text.endswith(".py")


def is_given(text: str) -> bool:
    """Tell whether a name refers to an object passed in by a program or a notebook."""
    return text.startswith(f"{NOTEBOOK}:")


def absolute(text: str) -> str:
    """Make the path in a name absolute: a record must make sense from any folder."""
    where, colon, name = text.rpartition(":")
    if is_file(text):
        where, colon, name = text, "", ""
    elif not (is_reference(text) and is_file(where)):
        return text
    return f"{Path(where).expanduser().resolve()}{colon}{name}"


def label(text: str) -> str:
    """Return the name in tables and folders: a file's stem, or the object's name."""
    if is_file(text):
        return Path(text).stem
    return text.rpartition(":")[2] if is_reference(text) else text


def hand_in(thing: Any, name: str) -> None:
    """Use an object itself, for the rest of a run, in place of what its file says. An
    error is raised instead.
    """
    _handed_in[name] = thing


def _in_place_of(name: str) -> Any:
    """Return what was handed in under this name, if anything."""
    found = _handed_in.get(name)
    if isinstance(found, UserError):
        raise found
    return found


def give(thing: Any, kind: str, source: str | None = None) -> str:
    """Register an object that a program or a notebook passes in; return its name.

    `source` stands for the object's own, if that is no longer to be found.
    """
    name = getattr(thing, "__name__", "").rpartition(".")[2]
    if not name.isidentifier():
        raise UserError(
            f"{kind}: {shown(thing)} has no name to record; give a class, or a function "
            "that is made by def"
        )
    _given.setdefault(name, {})[kind] = thing
    _sources.pop((name, kind), None)
    if source is not None:
        _sources[name, kind] = source
    return f"{NOTEBOOK}:{name}"


def given(text: str, kind: str) -> Any:
    """Return the object that was passed in as notebook:NAME."""
    name = text.partition(":")[2]
    if kind not in _given.get(name, {}):
        raise UserError(
            f"{kind} {text} was made in a notebook or a program, and is not in a file; "
            f"hand it in again, as in hpcfed.run(..., {kind.replace(' ', '')}={name})"
        )
    return _given[name][kind]


def load_object(text: str, kind: str) -> Any:
    """Return the object that FILE.py:NAME, package.module:NAME or notebook:NAME refers
    to.

    `kind` says what it should be, for messages: "model", "data set".
    """
    if is_given(text):
        return given(text, kind)
    handed_in = _in_place_of(text)
    if handed_in is not None:
        return handed_in
    where, _, name = text.rpartition(":")
    module = load_file(Path(where)) if is_file(where) else _load_package(where, kind)
    if not hasattr(module, name):
        known = [word for word in vars(module) if not word.startswith("_")]
        raise UserError(f"{kind} {text}: no {name} there{did_you_mean(name, known)}")
    return getattr(module, name)


def load_file(path: Path) -> ModuleType:
    """Import a Python file by its path, once; it can import files beside it."""
    path = path.expanduser()
    handed_in: ModuleType | None = _in_place_of(str(path))
    if handed_in is not None:
        return handed_in
    if not path.is_file():
        raise UserError(f"{path}: no such file; give the path of a Python file")
    return _load_file(path.resolve())


class _Hashed(SourceFileLoader):
    """Loads the bytes that were hashed, not a compiled file of the same second."""

    content: bytes

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.content, self.path)


@cache
def _load_file(path: Path) -> ModuleType:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    checksum = _checksum(content)
    # Named by content, because two folders may have files of the same name.
    name = f"{_FILE}{path.stem}_{checksum[:12]}"
    loader = _Hashed(name, str(path))
    loader.content = content
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickles of the file's classes look up their module there.
    sys.modules[name] = module
    _reach(path.parent)
    try:
        with one_line_of(f"{path} cannot be imported"):
            spec.loader.exec_module(module)
    except UserError as failed:
        del sys.modules[name]
        # As in `from .layers import …`: only a package's modules can do that.
        if "relative import" in str(failed):
            raise UserError(f"{failed}; name it as {_as_module(path)}") from failed
        raise
    _named.add(path)
    _loaded[path] = checksum
    _note_files()
    return module


def _as_module(path: Path) -> str:
    """Say how to name a file of a package, and from where that works."""
    words, folder = [path.stem], path.parent
    while (folder / "__init__.py").exists():
        words.insert(0, folder.name)
        folder = folder.parent
    if len(words) == 1:
        words.insert(0, folder.name)
        folder = folder.parent
    return f"{'.'.join(words)}:NAME, with PYTHONPATH={folder}"


def _reach(folder: Path) -> None:
    """Make imports find files of this folder before those of other files' folders."""
    name = str(folder)
    if name in sys.path and name not in _folders:
        return
    for other in _folders:
        sys.path.remove(other)
    if name in _folders:
        _folders.remove(name)
    _folders.insert(0, name)
    # At the end of the path: a file random.py beside it must not replace anything.
    sys.path.extend(_folders)
    # Forget modules of other folders that have the same name as a file of this one.
    for imported, module in list(sys.modules.items()):
        origin = Path(getattr(module, "__file__", None) or "")
        of_other = origin in _loaded and origin.parent != folder
        if of_other and (folder / origin.name).exists():
            del sys.modules[imported]


def _load_package(name: str, kind: str) -> ModuleType:
    with one_line_of(f"{kind}: module {name} cannot be imported"):
        module = importlib.import_module(name)
    _note_package(name, module)
    return module


def _note_package(name: str, module: ModuleType) -> None:
    """Record the checksum of a package's file at the time of its import, and of what it
    has imported from its folder and below, unless the package is installed.
    """
    origin = getattr(module, "__file__", None)
    if name in _packaged or not isinstance(origin, str) or not origin.endswith(".py"):
        return
    files = {origin}
    # The version of an installed package tells about all of its files.
    if module.__package__ and "site-packages" not in Path(origin).parts:
        package = module.__package__
        for other, imported in list(sys.modules.items()):
            file = getattr(imported, "__file__", None)
            is_part = other == package or other.startswith(f"{package}.")
            if is_part and str(file).endswith(".py"):
                files.add(str(file))
    _packaged[name] = {path: _checksum(Path(path).read_bytes()) for path in files}


def _note_files() -> None:
    """Record checksums of all that the user's files have imported, as it is now."""
    for path in _files() - set(_loaded):
        if path.is_file():
            _loaded[path] = _checksum(path.read_bytes())


def forget_changed() -> None:
    """Forget all imported files if one has changed, as in a running notebook, and what
    an earlier run was handed.
    """
    _handed_in.clear()
    changed = set()
    for path, checksum in _loaded.items():
        if not path.is_file() or _checksum(path.read_bytes()) != checksum:
            changed.add(path)
    if not changed:
        return
    # All of them: an unchanged file may have imported a changed one.
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        if isinstance(origin, str) and Path(origin) in _loaded:
            del sys.modules[name]
    for path in changed:
        # Python would trust a compiled file if the source has the same size as before
        # and was written in the same second.
        with suppress(OSError):
            Path(importlib.util.cache_from_source(str(path))).unlink()
    _loaded.clear()
    _named.clear()
    _load_file.cache_clear()
    importlib.invalidate_caches()


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@contextmanager
def one_line_of(doing: str) -> Iterator[None]:
    """Turn anything that user code raises into one line that says where."""
    try:
        yield
    except UserError:
        raise
    # A file may also call sys.exit.
    except (Exception, SystemExit) as error:
        raise UserError(f"{doing}: {one_line(error)}{line_of_user(error)}") from error


def line_of_user(error: BaseException) -> str:
    """Return the innermost line of the user's own files in a traceback, if any."""
    found, files = "", _files()
    for frame in traceback.extract_tb(error.__traceback__):
        if Path(frame.filename).resolve() in files:
            found = f" ({Path(frame.filename).name}, line {frame.lineno})"
    return found


def _files() -> set[Path]:
    """Return the user's files that are imported or currently being imported."""
    files = set(_loaded)
    folders = {str(path.parent) for path in files}
    within = tuple(folders)
    # There are thousands of modules, so what is quick comes first.
    for name, module in list(sys.modules.items()):
        is_users = name.startswith(_FILE)
        if not folders and not is_users:
            continue
        origin = getattr(module, "__file__", None)
        if not isinstance(origin, str):
            continue
        if is_users or (
            origin.startswith(within) and os.path.dirname(origin) in folders
        ):
            files.add(Path(origin))
    return files


def checksums(names: Iterable[str]) -> dict[str, str]:
    """Return the sha256 of the user's own Python code behind these names: files, what
    they have imported from their own folders, modules of packages, and the source of
    objects that were passed in.
    """
    _note_files()
    found: dict[str, str] = {}
    for text in names:
        where = text.rpartition(":")[0] if is_reference(text) else text
        if is_given(text):
            name = text.partition(":")[2]
            things = _given.get(name) or {"": given(text, "object")}
            sources = []
            for kind in sorted(things):
                sources.append(_sources.get((name, kind)) or _source(things[kind]))
            found[text] = _checksum("".join(sources).encode())
        elif is_file(where):
            found |= _of_file(Path(where).expanduser().resolve())
        elif where in _packaged:
            found |= _packaged[where]
    return dict(sorted(found.items()))


def _of_file(path: Path) -> dict[str, str]:
    """Return the checksums of a file and of what was imported from its folder."""
    found = {}
    for other, checksum in _loaded.items():
        # Another file that was named in its own right does not belong to this one.
        beside = other.parent == path.parent and other not in _named
        if other == path or beside:
            found[str(other)] = checksum
    return found


def _source(thing: Any) -> str:
    """Return the source of an object, or its name if the source is unknown."""
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return repr(getattr(thing, "__qualname__", thing))


def installed(group: str) -> dict[str, EntryPoint]:
    """Return what packages announce under `hpcfed.models` and the like, by name."""
    return {entry.name: entry for entry in entry_points(group=f"hpcfed.{group}")}


def load_installed(entry: EntryPoint) -> Any:
    """Import what an entry point names."""
    with one_line_of(f"plugin {entry.name} ({entry.value}) cannot be imported"):
        loaded = entry.load()
        _note_package(entry.name, sys.modules[entry.module])
        return loaded
