"""`checkpoints/<rounds done>/`: what a run needs to go on. Arrays without pickle, valid
once the marker stands there.

All ranks write files of their own, each under its name only when it is whole on disk;
the marker, which comes last, names them all with their checksums. A checkpoint whose
files do not match it is passed over for the one before, so two are kept. Each has a
copy of `run.h5`, too: what was recorded must not depend on a single file without
checksums.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from re import fullmatch
from typing import Any

import numpy as np

from hpcfed.errors import UserError, one_line
from hpcfed.record import folder as folders
from hpcfed.record.folder import CHECKPOINTS, RECORD
from hpcfed.record.publish import name_file, publish
from hpcfed.record.safe import check_file

KEPT = 2
MARKER = "complete.json"
MOST_MARKER = 16 * 2**20
"""Bytes of a marker that is read."""
BLOCK = 2**24
"""Bytes that are read between two looks at whether to stop."""
_FORMAT, _SCHEMA = "hpcfed checkpoint", 1


@dataclass(frozen=True)
class Part:
    """A file of a checkpoint."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Checkpoint:
    """One that is whole."""

    folder: Path
    rounds: int
    """Done."""
    parts: tuple[Part, ...]

    def read(
        self, name: str, dtype: np.dtype[Any] | type, shape: Sequence[int | None]
    ) -> np.ndarray:
        return load(self.folder, name, dtype, shape)

    def refusal(self, name: str, held: str) -> UserError:
        """Of an array that cannot be this run's, for what it holds."""
        return _refusal(self.folder / f"{name}.npy", held)

    def names(self, beginning: str) -> list[str]:
        """Arrays whose names begin so."""
        return [
            part.name.removesuffix(".npy")
            for part in self.parts
            if part.name.startswith(beginning)
        ]


def place(run: Path, rounds: int) -> Path:
    """The folder of a checkpoint."""
    return run / CHECKPOINTS / f"{rounds:08d}"


def write(folder: Path, name: str, array: np.ndarray) -> Part:
    """An array as NAME.npy; the folder must be there."""
    path = folder / f"{name}.npy"
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            counted = _Counted(file.write)
            np.lib.format.write_array(
                counted, np.ascontiguousarray(array), allow_pickle=False
            )
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        name_file(error, path)
        raise
    return Part(path.name, counted.size, counted.hash.hexdigest())


def prepare(folder: Path) -> None:
    """An empty folder for a checkpoint, whatever was there before."""
    _remove(folder)
    folder.mkdir(parents=True)


def copy(folder: Path, path: Path) -> Part:
    """A file as it is, under its own name."""
    content = path.read_bytes()
    publish(content, folder / path.name)
    return Part(path.name, len(content), hashlib.sha256(content).hexdigest())


def load(
    folder: Path, name: str, dtype: np.dtype[Any] | type, shape: Sequence[int | None]
) -> np.ndarray:
    """An array that `write` has written, of this kind (None: any length); a checksum
    does not say whose a file is.
    """
    path = folder / f"{name}.npy"
    try:
        array = _load(path)
    except Exception as error:  # whatever numpy says of a header that somebody made up
        raise UserError(f"{path} cannot be read: {one_line(error)}") from None
    fits = array.ndim == len(shape) and all(
        asked in (None, has) for asked, has in zip(shape, array.shape, strict=True)
    )
    if not fits or array.dtype != dtype:
        raise _refusal(path, f"{array.dtype} of shape {array.shape}")
    return array


def _refusal(path: Path, held: str) -> UserError:
    return UserError(f"{path} holds {held}: it is not of this run")


def _load(path: Path) -> np.ndarray:
    """A header that promises more than the file holds is not believed."""
    with open(path, "rb") as file:
        version = np.lib.format.read_magic(file)
        header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, _, dtype = header(file)
        if (
            dtype.hasobject
            or prod(shape) * dtype.itemsize != path.stat().st_size - file.tell()
        ):
            raise ValueError("no array of numbers of its size")
        file.seek(0)
        array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
    return array


def listed(folder: Path) -> list[str]:
    """The names of a checkpoint's files, by its marker; others that lie there are
    nobody's.
    """
    return [part.name for part in _marked(folder)]


class Interrupted(Exception):
    """A stop was asked for while checkpoints were read."""


def existing(path: Path, stopping: Callable[[], bool] = lambda: False) -> Part:
    """A file that something else has written to a checkpoint's folder."""
    size, digest = check_file(path), hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            if stopping():
                raise Interrupted
            digest.update(block)
        os.fsync(file.fileno())
    return Part(path.name, size, digest.hexdigest())


def complete(
    folder: Path, rounds: int, parts: Sequence[Part], *, keep: int = KEPT
) -> None:
    """Put up the marker, now that all parts are on disk, and remove all finished
    checkpoints but the last `keep`.
    """
    marker = {
        "format": _FORMAT,
        "schema": _SCHEMA,
        "rounds": rounds,
        "parts": [asdict(part) for part in parts],
    }
    publish(json.dumps(marker, indent=1).encode(), folder / MARKER)
    every = folders.checkpoint_folders(folder.parent.parent)
    finished = [old for old in every if (old / MARKER).exists()]
    for old in set(every) - set(finished[-keep:]):
        _remove(old)


def discard_after(run: Path, rounds: int) -> None:
    """A run goes on after so many rounds: checkpoints of later ones are damaged or
    unfinished.
    """
    for folder in folders.checkpoint_folders(run):
        if int(folder.name) > rounds:
            _remove(folder)


def recorded(run: Path) -> list[Path]:
    """The HDF5 files that going on may read, as they were written to checkpoints, the
    last first.

    The run's own `run.h5` is one of them only if no checkpoint has it: it may be
    damaged.
    """
    found = []
    for folder in reversed(folders.checkpoint_folders(run)):
        with suppress(*_DAMAGE):
            files = [part for part in _marked(folder) if part.name.endswith(".h5")]
            found += [folder / part.name for part in files if _is_whole(folder, part)]
    return (
        found if any(path.name == RECORD for path in found) else [*found, run / RECORD]
    )


def newest(
    run: Path, *, say: Callable[[str], None], below: int | None = None
) -> Checkpoint | None:
    """The last checkpoint that is whole, of those after fewer than `below` rounds;
    `say` hears of damaged ones.
    """
    found = common([run], say=say, below=below)
    return found[0] if found else None


def common(
    runs: Sequence[Path],
    *,
    say: Callable[[str], None],
    stopping: Callable[[], bool] = lambda: False,
    below: int | None = None,
) -> list[Checkpoint] | None:
    """Checkpoints of the last round after which every one of the runs has a whole one.

    Seeds that advance together must go on from the same round, or their sums would be
    rounded otherwise.
    """
    for run in runs:
        if (run / CHECKPOINTS).is_symlink():
            raise UserError(
                f"{run / CHECKPOINTS} is a link, which is not followed; put the folder itself there"
            )
    rounds = [
        {folder.name for folder in folders.checkpoint_folders(run)} for run in runs
    ]
    for name in sorted(set.intersection(*rounds), reverse=True):
        if below is not None and int(name) >= below:
            continue
        there = [run / CHECKPOINTS / name for run in runs]
        if not all(
            (folder / MARKER).exists() for folder in there
        ):  # it was not finished
            continue
        found = [_whole(folder, say, stopping) for folder in there]
        if all(found):
            return [checkpoint for checkpoint in found if checkpoint is not None]
    return None


_DAMAGE = (OSError, ValueError, KeyError, TypeError, RecursionError)


def _whole(
    folder: Path, say: Callable[[str], None], stopping: Callable[[], bool]
) -> Checkpoint | None:
    try:
        return _checked(folder, stopping)
    except _DAMAGE as error:
        say(f"checkpoint {folder} is damaged ({error}); going back to the one before")
        return None


def exist(run: Path) -> bool:
    """Whether a checkpoint was ever finished; nobody has looked whether it is whole."""
    return any((folder / MARKER).exists() for folder in folders.checkpoint_folders(run))


def _remove(folder: Path) -> None:
    (folder / MARKER).unlink(
        missing_ok=True
    )  # first, so that nobody takes what is left for whole
    shutil.rmtree(folder, ignore_errors=True)


def _checked(folder: Path, stopping: Callable[[], bool]) -> Checkpoint:
    parts = _marked(folder)
    for part in parts:
        if not _is_whole(folder, part, stopping):
            raise ValueError(f"{part.name} is not what was written")
    return Checkpoint(folder, int(folder.name), parts)


def _is_whole(
    folder: Path, part: Part, stopping: Callable[[], bool] = lambda: False
) -> bool:
    """Its size tells sooner than its checksum."""
    path = folder / part.name
    return check_file(path) == part.size and existing(path, stopping) == part


def _marked(folder: Path) -> tuple[Part, ...]:
    """What the marker names, if it speaks of files in this folder alone."""
    if folder.is_symlink():
        raise ValueError("it is a link, which is not followed")
    check_file(folder / MARKER, MOST_MARKER)
    marker: dict[str, Any] = json.loads((folder / MARKER).read_bytes())
    if (marker["format"], marker["schema"]) != (_FORMAT, _SCHEMA):
        raise ValueError("another version's")
    if marker["rounds"] != int(folder.name):
        raise ValueError(f"its marker is of round {marker['rounds']!r}")
    parts = tuple(Part(**part) for part in marker["parts"])
    for part in parts:
        if not fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*\.(npy|h5)", part.name):
            raise ValueError(f"{part.name!r} is no file's name")
        if not (folder / part.name).is_file() or (folder / part.name).is_symlink():
            raise ValueError(f"{part.name} is missing, or no plain file")
    return parts


class _Counted:
    """Counts and hashes what is written."""

    def __init__(self, write: Callable[[bytes], int]) -> None:
        self._write = write
        self.hash = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        self.hash.update(data)
        self.size += len(data)
        return self._write(data)
