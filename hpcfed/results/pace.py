"""How fast something goes, and how long the rest of it will take.

"Ms per round" means one thing wherever it stands: the median of a run's counted rounds,
each as long as it was on its slowest rank. Counted are all but the first rounds, which
warm up. The median, because one slow round must not count for the whole run. Phases are
medians of the same rounds, each the mean over ranks. A run that still goes on has a
pace, which is told as such: the median of its recent rounds.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

PER_ROUND = "per round (median)"
MS_PER_ROUND = f"ms {PER_ROUND}"
SECONDS_PER_ROUND = f"seconds {PER_ROUND}"
"""What tables and axes call it."""
PER_ROUND_MEANS = (
    "ms per round: the median over all rounds except warm-up, each timed on its slowest "
    "rank; phases: medians of the mean over ranks, so they need not add up"
)
"""What a page says about it."""
WARMUP = 1
"""Rounds at the start of a run that do not count, where no study says otherwise."""
LEAST = 10
"""A pace is the median of at least this many rounds, once they are done."""


def counted(rounds: np.ndarray, warmup: int = WARMUP) -> np.ndarray:
    """Return the rounds, along the first axis, whose times count. The last one does,
    even if all were to warm up: a short run still has a time.
    """
    last = max(0, len(rounds) - 1)
    return rounds[min(warmup, last) :]


def per_round(rounds: Sequence[float] | np.ndarray) -> Any:
    """Return what "per round" means of the rounds that count: the median along the
    first axis. NaN if there are none.
    """
    values = np.asarray(rounds, float)
    if not len(values):
        return np.full(values.shape[1:], np.nan)
    return np.median(values, axis=0)


def recent(seconds: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the later half of the rounds that are done, and at least ten of them; not
    the first one, which warms up, unless there is no other.
    """
    steady = counted(np.asarray(seconds, float))
    return steady[-max(LEAST, len(steady) // 2) :]


def pace(seconds: Sequence[float] | np.ndarray) -> float:
    """Return what recent rounds have taken, as the median: one of them may have had to
    wait for the server's learning. NaN when none is done.
    """
    return float(per_round(recent(seconds)))


def rest(seconds: Sequence[float] | np.ndarray, rounds: int) -> float:
    """Return what this number of further rounds will take; NaN before the first is done.

    By the mean, because rounds with an evaluation take longer than others, and both
    count.
    """
    known = recent(seconds)
    return rounds * float(known.mean()) if len(known) else float("nan")
