"""`checkpoints/<rounds done>/`: what a run needs to continue. Arrays without pickle,
valid once the marker exists.

Every rank writes its own files, and each gets its name only once it is whole on disk.
The marker comes last and lists all files with their checksums. If a checkpoint's files
do not match its marker, the one before is used, so two are kept. Each also has a copy
of `run.h5`: the record must not depend on a single file without checksums.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from re import fullmatch
from typing import Any

import numpy as np

from hpcfed.errors import UserError, one_line
from hpcfed.results.folder import CHECKPOINTS, RECORD, checkpoint_folders
from hpcfed.results.publish import make_durably, publish, replacing
from hpcfed.results.safe import check_file

KEPT = 2
"""Number of finished checkpoints to keep."""
MARKER = "complete.json"
MOST_MARKER = 16 * 2**20
"""Largest marker to read, in bytes."""
BLOCK = 2**24
"""Bytes read between two checks for a requested stop."""
_FORMAT, _SCHEMA = "hpcfed checkpoint", 1
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*\.(npy|h5)"
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_DAMAGE = (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError)
"""Exceptions that reading a damaged checkpoint may raise. Other errors of the system tell
nothing about it: a disk that fails now may answer later.
"""

Say = Callable[[str], None]
Stopping = Callable[[], bool]
"""Tells whether a stop was requested."""


class Interrupted(Exception):
    """A stop was requested while checkpoints were read."""


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint, as the marker describes it."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is whole."""

    folder: Path
    rounds: int
    """Number of finished rounds."""
    files: tuple[StoredFile, ...]

    def read(
        self, name: str, dtype: np.dtype[Any] | type, shape: Sequence[int | None]
    ) -> np.ndarray:
        """Read an array of this dtype and shape (None: any length)."""
        return load(self.folder, name, dtype, shape)

    def read_any(self, name: str) -> np.ndarray:
        """Read an array of numbers; the caller checks dtype and shape."""
        return _read(self.folder / f"{name}.npy")

    def refusal(self, name: str, held: str) -> UserError:
        """Return the error for an array that holds what cannot belong to this run."""
        return _refusal(self.folder / f"{name}.npy", held)

    def names(self, beginning: str) -> list[str]:
        """Return the arrays whose names have this prefix."""
        found = []
        for file in self.files:
            if file.name.startswith(beginning):
                found.append(file.name.removesuffix(".npy"))
        return found


# Writing.


def prepare(folder: Path) -> None:
    """Make an empty folder for a checkpoint, whatever was there before."""
    remove(folder)
    # Its name must be on disk before an older checkpoint is removed.
    make_durably(folder)


def write(folder: Path, name: str, array: np.ndarray) -> StoredFile:
    """Write an array as NAME.npy; the folder must exist."""
    path = folder / f"{name}.npy"
    # The folder is synced with the marker. No reader looks for the file before that.
    with replacing(path) as file:
        counted = _Counted(file.write)
        # `ascontiguousarray` would turn a scalar into a vector.
        contiguous = np.asarray(array, order="C")
        np.lib.format.write_array(counted, contiguous, allow_pickle=False)
    return StoredFile(path.name, counted.size, counted.hash.hexdigest())


class _Counted:
    """Counts and hashes what is written, so that it need not be read back."""

    def __init__(self, write: Callable[[bytes], int]) -> None:
        self._write = write
        self.hash = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        self.hash.update(data)
        self.size += len(data)
        return self._write(data)


def copy(folder: Path, path: Path) -> StoredFile:
    """Copy a file into a checkpoint under its own name."""
    # Read once, so that the checksum covers exactly the bytes that are written.
    content = path.read_bytes()
    publish(content, folder / path.name)
    return StoredFile(path.name, len(content), hashlib.sha256(content).hexdigest())


def existing(path: Path) -> StoredFile:
    """Describe and sync a file that other code has written to a checkpoint's folder."""
    # Its writer may not have synced it; the marker must not be on disk first.
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return _described(path)


def _described(path: Path, stopping: Stopping = lambda: False) -> StoredFile:
    size, digest = check_file(path), hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            if stopping():
                raise Interrupted
            digest.update(block)
    return StoredFile(path.name, size, digest.hexdigest())


def complete(
    folder: Path,
    rounds: int,
    files: Sequence[StoredFile],
    *,
    keep: int = KEPT,
    passing: Collection[int] = (),
) -> None:
    """Write the marker, and remove all but the last `keep` finished checkpoints, and the
    last `keep` of those that are not of `passing` rounds.
    """
    marker = {
        "format": _FORMAT,
        "schema": _SCHEMA,
        "rounds": rounds,
        "parts": [asdict(file) for file in files],
    }
    publish(json.dumps(marker, indent=1).encode(), folder / MARKER)
    # Only now: until this checkpoint is whole, a run would continue from an older one.
    # RUN/checkpoints/ROUNDS is where `checkpoint_folder` puts it.
    run = folder.parent.parent
    every = checkpoint_folders(run)
    finished = [old for old in every if (old / MARKER).exists()]
    staying = [old for old in finished if int(old.name) not in passing]
    for old in set(every) - {*finished[-keep:], *staying[-keep:]}:
        remove(old)


def remove(folder: Path) -> None:
    """Remove a checkpoint, its marker first: the rest must not look whole."""
    # Without its marker nothing here counts, even if the process dies before the next
    # line.
    (folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def discard_after(run: Path, rounds: int) -> None:
    """Remove checkpoints of later rounds, which are damaged or unfinished."""
    for folder in checkpoint_folders(run):
        if int(folder.name) > rounds:
            remove(folder)


# Reading.


def load(
    folder: Path, name: str, dtype: np.dtype[Any] | type, shape: Sequence[int | None]
) -> np.ndarray:
    """Read an array that `write` has written, with this dtype and shape (None: any
    length).

    A checksum does not say whose file it is, so dtype and shape are checked, too.
    """
    path = folder / f"{name}.npy"
    array = _read(path)
    fits = array.ndim == len(shape)
    fits = fits and array.dtype == dtype
    for asked, found in zip(shape, array.shape, strict=False):
        fits = fits and asked in (None, found)
    if not fits:
        raise _refusal(path, f"{array.dtype} of shape {array.shape}")
    return array


def _read(path: Path) -> np.ndarray:
    try:
        return _load(path)
    except Exception as error:  # whatever numpy raises for a forged header
        raise UserError(f"{path} cannot be read: {one_line(error)}") from None


def _refusal(path: Path, held: str) -> UserError:
    return UserError(f"{path} holds {held}: it does not belong to this run")


def _load(path: Path) -> np.ndarray:
    """Read an array; refuse it if its header does not match the size of the file."""
    with open(path, "rb") as file:
        version = np.lib.format.read_magic(file)
        shape, _, dtype = _HEADERS[version](file)
        promised = prod(shape) * dtype.itemsize
        # A forged header could ask numpy for any amount of memory.
        held = path.stat().st_size - file.tell()
        # An array of objects would be a pickle, which may run any code.
        if dtype.hasobject or promised != held:
            raise ValueError("not an array of numbers of its size")
        file.seek(0)
        array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
    return array


def exist(run: Path) -> bool:
    """Tell whether a checkpoint was ever finished; it need not be whole."""
    return any((folder / MARKER).exists() for folder in checkpoint_folders(run))


def newest_rounds(run: Path) -> int:
    """Return the rounds before the newest finished checkpoint, whole or not; else 0."""
    finished = [path for path in checkpoint_folders(run) if (path / MARKER).exists()]
    return int(finished[-1].name) if finished else 0


def listed(folder: Path) -> list[str]:
    """Return the names of a checkpoint's files, as its marker lists them."""
    return [file.name for file in _marked(folder)]


def recorded(run: Path, *, record_only: bool = False) -> list[Path]:
    """Return the HDF5 files that a resumed run may read, as copied to checkpoints, last
    one first; or only the copies of the record.

    The run's own `run.h5` is included only if no checkpoint has it, because it may be
    damaged. The server's files may be large, so only one rank should hash them.
    """
    found = []
    for folder in reversed(checkpoint_folders(run)):
        with suppress(OSError, *_DAMAGE):
            for file in _marked(folder):
                wanted = file.name == RECORD
                if not record_only:
                    wanted = file.name.endswith(".h5")
                if wanted and _is_whole(folder, file):
                    found.append(folder / file.name)
    if not any(path.name == RECORD for path in found):
        found.append(run / RECORD)
    return found


def newest(run: Path, *, say: Say, below: int | None = None) -> Checkpoint | None:
    """Return the last whole checkpoint `below` a round; report damaged ones."""
    found = common([run], say=say, below=below)
    return found[0] if found else None


def common(
    runs: Sequence[Path],
    *,
    say: Say,
    stopping: Stopping = lambda: False,
    below: int | None = None,
) -> list[Checkpoint] | None:
    """Return the checkpoints of the last round for which every run has a whole one.

    Seeds that advance together must continue from the same round, or their sums would
    be rounded differently.
    """
    rounds = []
    for run in runs:
        there = run / CHECKPOINTS
        if there.is_symlink():
            raise UserError(
                f"{there} is a link, which is not followed; put the folder itself there"
            )
        names = {folder.name for folder in checkpoint_folders(run)}
        rounds.append(names)
    # Names have leading zeros, so they sort in the order of rounds.
    for name in sorted(set.intersection(*rounds), reverse=True):
        if below is not None and int(name) >= below:
            continue
        folders = [run / CHECKPOINTS / name for run in runs]
        # A checkpoint without a marker is unfinished, not damaged.
        finished = all((folder / MARKER).exists() for folder in folders)
        if not finished:
            continue
        whole = []
        for folder in folders:
            checkpoint = _if_whole(folder, say, stopping)
            if checkpoint is not None:
                whole.append(checkpoint)
        if len(whole) == len(runs):
            return whole
    return None


def _if_whole(folder: Path, say: Say, stopping: Stopping) -> Checkpoint | None:
    """Return a checkpoint, or report how it is damaged."""
    try:
        files = _marked(folder)
        for file in files:
            if not _is_whole(folder, file, stopping):
                raise ValueError(f"{file.name} is not what was written")
    except _DAMAGE as error:
        say(f"checkpoint {folder} is damaged ({error}); going back to the one before")
        return None
    except OSError as error:
        # To go on from an older one would remove it.
        raise UserError(
            f"checkpoint {folder} cannot be read: {error.strerror}; resume when it can "
            "be, or move it elsewhere to go back to the one before"
        ) from None
    return Checkpoint(folder, int(folder.name), files)


def _is_whole(
    folder: Path, file: StoredFile, stopping: Stopping = lambda: False
) -> bool:
    """Compare a file with its entry in the marker; the size before the checksum."""
    # A write that was cut short has another size; then gigabytes need not be read.
    path = folder / file.name
    return check_file(path) == file.size and _described(path, stopping) == file


def _marked(folder: Path) -> tuple[StoredFile, ...]:
    """Return the files that the marker lists, if all of them are in this folder."""
    if folder.is_symlink():
        raise ValueError("it is a link, which is not followed")
    # The marker itself may be untrusted and hold anything.
    check_file(folder / MARKER, MOST_MARKER)
    marker: dict[str, Any] = json.loads((folder / MARKER).read_bytes())
    if (marker["format"], marker["schema"]) != (_FORMAT, _SCHEMA):
        raise ValueError("it is of another version")
    if marker["rounds"] != int(folder.name):
        raise ValueError(f"its marker is of round {marker['rounds']!r}")
    files = tuple(StoredFile(**file) for file in marker["parts"])
    for file in files:
        # A name with a slash would lead outside the folder.
        if not fullmatch(_NAME, file.name):
            raise ValueError(f"{file.name!r} is not a file's name")
        path = folder / file.name
        if not path.is_file() or path.is_symlink():
            raise ValueError(f"{file.name} is missing, or is not a plain file")
    return files
