"""Faults that are done to a run from outside, or ordered from it."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.faults.disks import fill, read_only, replace
from benchmarks.faults.lives import STALL, Job
from benchmarks.faults.references import pace
from hpcfed.results import checkpoints

KILLED = ("killall", "flip", "truncate", "links", "files")
"""Kinds of faults that begin with the end of all ranks."""


def order(kind: str, orders: Path, chance: random.Random) -> Path:
    """Order a fault from one of the ranks, and return the file, which the rank removes
    when it obeys.
    """
    path = orders / f"order-{chance.randrange(2)}"
    temporary = orders / "unfinished"
    temporary.write_text(kind)
    temporary.rename(path)  # so that the rank sees all of it or nothing
    return path


def withdraw(orders: Path) -> None:
    """Remove orders that came too late for the run that they were meant for."""
    for path in orders.glob("order-*"):
        path.unlink()


def inject(
    kind: str, job: Job, orders: Path, out: Path, chance: random.Random
) -> Callable[[], None]:
    """Do what ends a run, and return what undoes it once the run has ended."""
    ranks = job.ranks()
    # No rank is left where the run has ended meanwhile.
    with contextlib.suppress(IndexError):
        if kind == "kill":
            _send([chance.choice(ranks)], signal.SIGKILL)
        elif kind in KILLED:
            _send(ranks, signal.SIGKILL)
        elif kind == "hangup":
            _send([job.process.pid], signal.SIGHUP)
        elif kind == "hang":
            _send([chance.choice(ranks)], signal.SIGSTOP)
        elif kind == "raise":
            order(kind, orders, chance)
        elif kind == "disk":
            return fill(out.parent)
        elif kind == "unwritable":
            return chance.choice((replace, read_only))(out, job)
    return lambda: None


def ask_to_stop(job: Job, chance: random.Random) -> bool:
    """Ask mpirun, one rank or all to stop; return whether the signal reaches ranks as it
    is.

    mpirun has an exit code of its own for SIGTERM and SIGINT, and kills ranks that have
    not ended after a second or so.
    """
    ranks, mpirun = job.ranks(), [job.process.pid]
    number = chance.choice((signal.SIGTERM, signal.SIGINT, signal.SIGUSR2))
    if not ranks:
        return True
    targets = chance.choice((mpirun, ranks, [chance.choice(ranks)]))
    _send(targets, number)
    return number == signal.SIGUSR2 or targets != mpirun


def suspend(job: Job, orders: Path, chance: random.Random) -> bool:
    """Halt all ranks for longer than --stall-timeout; return False where they had ended
    before.
    """
    # Rounds take long enough to be hit in the midst of a phase whose begin the watcher
    # of stalls has seen.
    pace(orders, 2.0)
    time.sleep(1.2)
    ranks = job.ranks()
    _send(ranks, signal.SIGSTOP)
    if ranks:
        time.sleep(STALL + chance.uniform(0.3, 1.0))
        _send(ranks, signal.SIGCONT)
    pace(orders, 0)
    return bool(ranks)


def hang_up(job: Job, orders: Path, chance: random.Random) -> bool:
    """Tell one rank or all that their terminal has gone; return False where they had
    ended before.
    """
    ranks = job.ranks()
    if chance.random() < 0.5:
        ranks = ranks[:1]
    _send(ranks, signal.SIGHUP)
    pace(orders, 0)
    return bool(ranks)


def damageable(out: Path, chance: random.Random) -> Path | None:
    """Return a file whose damage a run can bear: there must be another checkpoint."""
    markers = out.glob(f"checkpoints/*/{checkpoints.MARKER}")
    whole = sorted(marker.parent for marker in markers)
    if not whole:
        return None
    files = [out / "run.h5"]
    if len(whole) > 1 and chance.random() < 0.7:
        files = sorted(whole[-1].iterdir())
    return chance.choice(files)


def _send(processes: Iterable[int], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        for process in processes:
            os.kill(process, number)
