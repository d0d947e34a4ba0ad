"""Small disks that are full or read-only, or whose folder is replaced by a file."""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.faults.lives import PATIENCE, Job


def fill(folder: Path) -> Callable[[], None]:
    """Fill the disk, and return what frees it again."""
    ballast = folder / "ballast"
    with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
        # Unbuffered and in small pieces, until nothing more fits.
        while file.write(bytes(2**12)):
            pass
    return lambda: ballast.unlink(missing_ok=True)


def read_only(out: Path, job: Job) -> Callable[[], None]:
    """Make the disk read-only, as soon as no file on it is being written; return what
    undoes it.
    """
    job.until(lambda: mount("-o", "remount,ro", str(out.parent)), PATIENCE)

    def mend() -> None:
        mount("-o", "remount,rw", str(out.parent))

    return mend


def replace(out: Path, job: Job) -> Callable[[], None]:
    """Put a file where the folder was, and return what undoes it."""
    away = out.with_name("away")
    out.rename(away)
    out.touch()

    def mend() -> None:
        out.unlink()
        away.rename(out)

    return mend


def mount(*words: str) -> bool:
    """Return whether mounting has worked."""
    return not subprocess.run(["mount", *words], capture_output=True).returncode


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a disk of 16 MiB within the block."""
    folder.mkdir(parents=True)
    if not mount("-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)):
        sys.exit("faults: disks that are full or read-only can be had by root only")
    try:
        yield
    finally:
        # Lazily, because ranks that were killed may still hold files there.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
