"""The file system of --out: whether all that a run does with files works there."""

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import nan
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from hpcfed.doctor.finding import Finding, error, fine, skipped, warning
from hpcfed.errors import UserError, one_line
from hpcfed.results.claim import claimed
from hpcfed.results.publish import hdf5_writing, publish
from hpcfed.runtime.meetings import wait_for
from hpcfed.words import bytes_text, seconds_text

PREFIX = ".hpcfed-doctor-"
WRITTEN = 2**24
"""Bytes to write."""
LITTLE = 5 * 2**30
"""Free bytes below which a warning is due."""
TOO_LITTLE = 2**28
"""Free bytes below which hardly any run fits."""
SLOW_SPEED = 20e6
"""Bytes per second."""
SLOW_RENAME = 1.0
"""Seconds to publish a small file."""
VISIBLE = 5.0
"""Seconds after which other nodes must see a file; NFS may look once in three."""
REMOVED = 1.0
"""Seconds after which our folders must be gone."""
FLEETING = {"tmpfs": "memory", "ramfs": "memory", "overlay": "a container's own layer"}
"""File systems whose files end with the node or the container, and what they are."""
NETWORKED = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs")
"""File systems that are slow to show what other nodes have written."""
WRITE, RENAME, LOCKS, HDF5 = "write, fsync", "rename", "locks", "HDF5"
"""What a run does with files."""
ADVICE = {
    WRITE: "name an --out that you may write to, and that has room: df, quota",
    RENAME: "name an --out elsewhere: run.h5 and checkpoints are published by a rename",
    LOCKS: "never start two runs with the same --out: nothing would keep them apart",
    HDF5: "name an --out elsewhere, or export HDF5_USE_FILE_LOCKING=FALSE if it is "
    "about locks",
}
"""What to do if a step fails."""


class Step(NamedTuple):
    """One thing that a run does with files."""

    name: str
    failure: str = ""
    """Why it failed; empty if it did not."""
    seconds: float = nan


class StorageProbe(NamedTuple):
    """A rank's view of the file system."""

    host: str
    folder: str
    kind: str
    """As Linux names it: ext4, nfs4, lustre."""
    free: int
    """Bytes."""
    free_files: int | None
    """None if their number has no limit."""
    steps: tuple[Step, ...]


class NoLock(OSError):
    """A file can be locked twice."""


def look(out: Path, host: str) -> StorageProbe:
    """Do all that a run does with files, in a folder of our own beside the results."""
    near = nearest(out)
    status = os.statvfs(near)
    # Some file systems count no files.
    files = status.f_favail if status.f_files else None
    return StorageProbe(
        host,
        str(near),
        mounted(near),
        status.f_bavail * status.f_frsize,
        files,
        tuple(_steps(near)),
    )


def nearest(out: Path) -> Path:
    """Return the folder itself, or the nearest one above it that exists."""
    path = out.absolute()
    while not path.exists():
        path = path.parent
    return path


def mounted(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Return the kind of file system that holds a folder."""
    kind, longest = "unknown", -1
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return kind
    for line in lines:
        _, place, name, *_ = line.split(" ")
        # Linux writes spaces and the like as octal numbers.
        place = place.encode().decode("unicode_escape")
        holds = folder.resolve().is_relative_to(place)
        # Of several mounts on one place, the last one counts.
        if holds and len(place) >= longest:
            kind, longest = name, len(place)
    return kind


def _steps(near: Path) -> Iterator[Step]:
    try:
        with _own_folder(near) as folder:
            yield from _worked(folder)
    except OSError as failure:
        # The folder could not be made: steps tell their own failures.
        yield Step(WRITE, reason(failure))


def _worked(folder: Path) -> Iterator[Step]:
    for name, work in WORKS.items():
        begin = time.perf_counter()
        try:
            work(folder)
        except (OSError, ValueError, RuntimeError) as failure:
            yield Step(name, reason(failure))
        else:
            yield Step(name, "", time.perf_counter() - begin)


_made: list[Path] = []
"""All folders that were made here."""


@contextmanager
def _own_folder(near: Path) -> Iterator[Path]:
    """Make a folder for this block."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=near))
    _made.append(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_left() -> None:
    """Remove our folders in which other threads still work, as after Ctrl-C."""

    def gone() -> bool:
        for folder in _made:
            shutil.rmtree(folder, ignore_errors=True)
        return not any(folder.exists() for folder in _made)

    # A thread may write a file while its folder is being removed.
    wait_for(gone, REMOVED)
    _made.clear()


def reason(failure: BaseException) -> str:
    """Return the system's words for a failure, without the path."""
    if isinstance(failure, OSError) and failure.strerror:
        return failure.strerror
    return one_line(failure)


def _write(folder: Path) -> None:
    path = folder / "written"
    try:
        with open(path, "wb") as file:
            file.write(os.urandom(WRITTEN))
            file.flush()
            os.fsync(file.fileno())
    finally:
        # Later steps must not fail because this one has filled the disk.
        path.unlink(missing_ok=True)


def _rename(folder: Path) -> None:
    path = folder / "published"
    for content in (b"old", b"new"):
        publish(content, path)
    if path.read_bytes() != b"new":
        raise OSError(errno.EIO, "a file has its old content after a rename")


def _lock(folder: Path) -> None:
    with claimed(folder):
        if not is_claimed(folder):
            raise NoLock(errno.ENOLCK, "a file can be locked twice")


def is_claimed(folder: Path) -> bool:
    """Tell whether a second run would be refused."""
    try:
        with claimed(folder):
            return False
    except UserError:
        return True


def _hdf5(folder: Path) -> None:
    path, numbers = folder / "probe.h5", np.arange(1000.0)
    with hdf5_writing(path), h5py.File(path, "w") as file:
        file["numbers"] = numbers
    with h5py.File(path) as file:
        if not np.array_equal(file["numbers"][()], numbers):
            raise OSError(errno.EIO, "HDF5 reads other numbers than it has written")


WORKS: dict[str, Callable[[Path], None]] = {
    WRITE: _write,
    RENAME: _rename,
    LOCKS: _lock,
    HDF5: _hdf5,
}
"""The steps, in this order."""


def judge(ranks: Mapping[int, StorageProbe], out: Path) -> list[Finding]:
    """Judge the file system as each node's first rank sees it."""
    bad = [one for rank, probe in ranks.items() for one in _judge_one(rank, probe)]
    found: list[Finding] = []
    for good in _fine(ranks, out):
        found += [one for one in bad if one.check == good.check] or [good]
    return found


def _fine(ranks: Mapping[int, StorageProbe], out: Path) -> Iterator[Finding]:
    """Yield what to say of each check if it finds nothing wrong."""
    first = next(iter(ranks.values()))
    there = "" if Path(first.folder) == out.absolute() else f" ({out} is not there yet)"
    yield fine("folder", f"{first.folder}{there}: {first.kind}")
    free = min(probe.free for probe in ranks.values())
    yield fine("free space", bytes_text(free), bytes=free)
    steps = [step for probe in ranks.values() for step in probe.steps]
    for name in WORKS:
        # Where no folder can be made, later steps were not tried.
        seconds = [step.seconds for step in steps if step.name == name]
        if seconds:
            yield _fine_step(name, max(seconds))


def _fine_step(name: str, seconds: float) -> Finding:
    if name == WRITE:
        speed = WRITTEN / seconds
        return fine(name, f"{bytes_text(speed)}/s", bytes_per_second=speed)
    if name == RENAME:
        # A step publishes two files.
        each = seconds / 2
        return fine(name, f"{seconds_text(each)} to publish a file", seconds=each)
    return fine(
        name, "a second run is refused" if name == LOCKS else "written and read"
    )


def _judge_one(rank: int, probe: StorageProbe) -> Iterator[Finding]:
    where = probe.folder
    if probe.kind in FLEETING:
        told = f"{where} is {FLEETING[probe.kind]} ({probe.kind})"
        advice = "name an --out whose files stay: these end with the node or container"
        yield warning("folder", told, advice, rank)
    if probe.kind in NETWORKED:
        told = f"{where} is on {probe.kind}"
        advice = (
            "rather name a parallel file system: snapshots of many ranks are slow here"
        )
        yield warning("folder", told, advice, rank)
    if probe.free < LITTLE:
        told = f"{bytes_text(probe.free)} in {where}"
        level = error if probe.free < TOO_LITTLE else warning
        advice = "free some, or name another --out"
        yield level("free space", told, advice, rank, bytes=probe.free)
    if probe.free_files is not None and probe.free_files < 1000:
        told = f"room for {probe.free_files} more files in {where}"
        yield error("free space", told, "remove files, or name another --out", rank)
    for step in probe.steps:
        if step.failure:
            level = warning if step.name == LOCKS else error
            told = f"{where}: {step.failure}"
            yield level(step.name, told, ADVICE[step.name], rank)
        elif step.name == WRITE and WRITTEN / step.seconds < SLOW_SPEED:
            speed = WRITTEN / step.seconds
            told = f"{bytes_text(speed)}/s in {where}"
            advice = "name a faster --out, or write fewer snapshots and checkpoints"
            yield warning(WRITE, told, advice, rank, bytes_per_second=speed)
        elif step.name == RENAME and step.seconds / 2 > SLOW_RENAME:
            each = step.seconds / 2
            told = f"{seconds_text(each)} to publish a file in {where}"
            advice = "name a faster --out: each recorded round publishes run.h5"
            yield warning(RENAME, told, advice, rank, seconds=each)


# Whether all nodes see the same folder, and each other's locks.


@contextmanager
def offered(out: Path) -> Iterator[Path]:
    """Hold the claim of a new folder within the block, for other nodes to look at."""
    with _own_folder(nearest(out)) as folder, claimed(folder):
        yield folder


class Seen(NamedTuple):
    """What a node sees of the root's folder."""

    there: bool
    locked: bool


def see(folder: Path) -> Seen:
    """Look at the folder that the root has made."""
    there = wait_for(folder.is_dir, VISIBLE)
    return Seen(there, there and is_claimed(folder))


def judge_shared(ranks: Mapping[int, Seen]) -> Finding:
    """Judge what the first ranks of other nodes see."""
    if not ranks:
        return skipped("shared", "one node")
    blind = [rank for rank, seen in ranks.items() if not seen.there]
    if blind:
        told = "does not see what rank 0 writes to --out"
        advice = "name an --out on a file system that all nodes share"
        return error("shared", told, advice, *blind)
    free = [rank for rank, seen in ranks.items() if not seen.locked]
    if free:
        told = "does not see the lock of rank 0"
        advice = f"{ADVICE[LOCKS]}; Lustre needs the mount option flock"
        return warning("shared", told, advice, *free)
    return fine("shared", "all nodes see the folder and its lock")
