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
from hpcfed.record.folder import CHECKPOINTS, RECORD, checkpoint_folders
from hpcfed.record.publish import publish, replacing
from hpcfed.record.safe import check_file

KEPT = 2
"""Finished checkpoints that stay."""
MARKER = "complete.json"
MOST_MARKER = 16 * 2**20
"""Bytes of a marker that is read."""
BLOCK = 2**24
"""Bytes that are read between two looks at whether to stop."""
_FORMAT, _SCHEMA = "hpcfed checkpoint", 1
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*\.(npy|h5)"
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_DAMAGE = (OSError, ValueError, KeyError, TypeError, RecursionError)
"""What reading a damaged checkpoint may raise."""

Say = Callable[[str], None]
Stopping = Callable[[], bool]
"""Tells whether a stop was asked for."""


class Interrupted(Exception):
    """A stop was asked for while checkpoints were read."""


@dataclass(frozen=True)
class Part:
    """A file of a checkpoint, as the marker describes it."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is whole."""

    folder: Path
    rounds: int
    """Rounds that are done."""
    parts: tuple[Part, ...]

    def read(
        self, name: str, dtype: np.dtype[Any] | type, shape: Sequence[int | None]
    ) -> np.ndarray:
        """Read an array of this kind (None: any length)."""
        return load(self.folder, name, dtype, shape)

    def refusal(self, name: str, held: str) -> UserError:
        """Return the error about an array that cannot be this run's, for what it holds."""
        return _refusal(self.folder / f"{name}.npy", held)

    def names(self, beginning: str) -> list[str]:
        """Return the arrays whose names begin so."""
        found = [part.name for part in self.parts if part.name.startswith(beginning)]
        return [name.removesuffix(".npy") for name in found]


# Writing.


def prepare(folder: Path) -> None:
    """Make an empty folder for a checkpoint, whatever was there before."""
    remove(folder)
    folder.mkdir(parents=True)


def write(folder: Path, name: str, array: np.ndarray) -> Part:
    """Write an array as NAME.npy; the folder must be there."""
    path = folder / f"{name}.npy"
    with replacing(path) as file:
        counted = _Counted(file.write)
        contiguous = np.ascontiguousarray(array)
        np.lib.format.write_array(counted, contiguous, allow_pickle=False)
    return Part(path.name, counted.size, counted.hash.hexdigest())


class _Counted:
    """Counts and hashes what is written, so that nobody has to read it again."""

    def __init__(self, write: Callable[[bytes], int]) -> None:
        self._write = write
        self.hash = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        self.hash.update(data)
        self.size += len(data)
        return self._write(data)


def copy(folder: Path, path: Path) -> Part:
    """Copy a file into a checkpoint under its own name."""
    content = path.read_bytes()
    publish(content, folder / path.name)
    return Part(path.name, len(content), hashlib.sha256(content).hexdigest())


def existing(path: Path, stopping: Stopping = lambda: False) -> Part:
    """Describe a file that something else has written to a checkpoint's folder."""
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
    every = checkpoint_folders(folder.parent.parent)
    finished = [old for old in every if (old / MARKER).exists()]
    for old in set(every) - set(finished[-keep:]):
        remove(old)


def remove(folder: Path) -> None:
    """Remove a checkpoint; the marker first, so that nobody takes what is left for
    whole.
    """
    (folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def discard_after(run: Path, rounds: int) -> None:
    """Remove checkpoints of later rounds than those that a run goes on after: they are
    damaged or unfinished.
    """
    for folder in checkpoint_folders(run):
        if int(folder.name) > rounds:
            remove(folder)


# Reading.


def load(
    folder: Path, name: str, dtype: np.dtype[Any] | type, shape: Sequence[int | None]
) -> np.ndarray:
    """Read an array that `write` has written, of this kind (None: any length).

    A checksum does not say whose file it is, so type and shape are checked, too.
    """
    path = folder / f"{name}.npy"
    try:
        array = _load(path)
    except Exception as error:  # whatever numpy says of a header that somebody made up
        raise UserError(f"{path} cannot be read: {one_line(error)}") from None
    fits = array.ndim == len(shape) and array.dtype == dtype
    for asked, found in zip(shape, array.shape, strict=False):
        fits = fits and asked in (None, found)
    if not fits:
        raise _refusal(path, f"{array.dtype} of shape {array.shape}")
    return array


def _refusal(path: Path, held: str) -> UserError:
    return UserError(f"{path} holds {held}: it is not of this run")


def _load(path: Path) -> np.ndarray:
    """Read an array; a header that promises more than the file holds is not believed."""
    with open(path, "rb") as file:
        version = np.lib.format.read_magic(file)
        shape, _, dtype = _HEADERS[version](file)
        promised = prod(shape) * dtype.itemsize
        if dtype.hasobject or promised != path.stat().st_size - file.tell():
            raise ValueError("no array of numbers of its size")
        file.seek(0)
        array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
    return array


def exist(run: Path) -> bool:
    """Tell whether a checkpoint was ever finished; nobody has looked whether it is
    whole.
    """
    return any((folder / MARKER).exists() for folder in checkpoint_folders(run))


def listed(folder: Path) -> list[str]:
    """Return the names of a checkpoint's files, by its marker; others that lie there
    are nobody's.
    """
    return [part.name for part in _marked(folder)]


def recorded(run: Path, *, record_only: bool = False) -> list[Path]:
    """Return the HDF5 files that going on may read, as they were written to
    checkpoints, the last first; or copies of the record alone.

    The run's own `run.h5` is one of them only if no checkpoint has it: it may be
    damaged. The server's files may be large: only one rank should hash them.
    """
    found = []
    for folder in reversed(checkpoint_folders(run)):
        with suppress(*_DAMAGE):
            for part in _marked(folder):
                wanted = part.name == RECORD
                if not record_only:
                    wanted = part.name.endswith(".h5")
                if wanted and _is_whole(folder, part):
                    found.append(folder / part.name)
    if not any(path.name == RECORD for path in found):
        found.append(run / RECORD)
    return found


def newest(run: Path, *, say: Say, below: int | None = None) -> Checkpoint | None:
    """Return the last checkpoint that is whole, of those after fewer than `below`
    rounds; `say` hears of damaged ones.
    """
    found = common([run], say=say, below=below)
    return found[0] if found else None


def common(
    runs: Sequence[Path],
    *,
    say: Say,
    stopping: Stopping = lambda: False,
    below: int | None = None,
) -> list[Checkpoint] | None:
    """Return the checkpoints of the last round after which every run has a whole one.

    Seeds that advance together must go on from the same round, or their sums would be
    rounded otherwise.
    """
    rounds = []
    for run in runs:
        if (run / CHECKPOINTS).is_symlink():
            raise UserError(
                f"{run / CHECKPOINTS} is a link, which is not followed; put the folder "
                "itself there"
            )
        rounds.append({folder.name for folder in checkpoint_folders(run)})
    for name in sorted(set.intersection(*rounds), reverse=True):
        if below is not None and int(name) >= below:
            continue
        there = [run / CHECKPOINTS / name for run in runs]
        finished = all((folder / MARKER).exists() for folder in there)
        if not finished:
            continue
        found = [_if_whole(folder, say, stopping) for folder in there]
        whole = [checkpoint for checkpoint in found if checkpoint is not None]
        if len(whole) == len(runs):
            return whole
    return None


def _if_whole(folder: Path, say: Say, stopping: Stopping) -> Checkpoint | None:
    """Return a checkpoint, or say how it is damaged."""
    try:
        parts = _marked(folder)
        for part in parts:
            if not _is_whole(folder, part, stopping):
                raise ValueError(f"{part.name} is not what was written")
    except _DAMAGE as error:
        say(f"checkpoint {folder} is damaged ({error}); going back to the one before")
        return None
    return Checkpoint(folder, int(folder.name), parts)


def _is_whole(folder: Path, part: Part, stopping: Stopping = lambda: False) -> bool:
    """Compare a file with what the marker says; its size tells sooner than its
    checksum.
    """
    path = folder / part.name
    return check_file(path) == part.size and existing(path, stopping) == part


def _marked(folder: Path) -> tuple[Part, ...]:
    """Return the files that the marker names, if it speaks of files in this folder
    alone.
    """
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
        if not fullmatch(_NAME, part.name):
            raise ValueError(f"{part.name!r} is no file's name")
        path = folder / part.name
        if not path.is_file() or path.is_symlink():
            raise ValueError(f"{part.name} is missing, or no plain file")
    return parts
