"""How fast a run is, and how long the rest of it will take.

"Ms per round" means the same everywhere: the median over a run's counted rounds, each
timed on its slowest rank. All rounds count except the first ones, which warm up. It is
the median, because one slow round must not count for the whole run. Phases are medians
of the same rounds, each the mean over ranks. A run in progress has a pace instead, and
it is called that: the median of its recent rounds.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

PER_ROUND = "per round (median)"
MS_PER_ROUND = f"ms {PER_ROUND}"
SECONDS_PER_ROUND = f"seconds {PER_ROUND}"
"""Its name in tables and on axes."""
PER_ROUND_MEANS = (
    "ms per round: the median over all rounds except warm-up, each timed on its slowest "
    "rank; phases: medians of the mean over ranks, so they need not add up"
)
"""Its explanation on a page."""
WARMUP = 1
"""Rounds at the start of a run that do not count, unless a study says otherwise."""
LEAST = 10
"""A pace is the median of at least this number of rounds, once they are done."""


def counted(rounds: np.ndarray, warmup: int = WARMUP) -> np.ndarray:
    """Return the rounds, along the first axis, whose times count. The last one always
    counts, even if all rounds were to warm up: a short run still has a time.
    """
    last = max(0, len(rounds) - 1)
    return rounds[min(warmup, last) :]


def per_round(rounds: Sequence[float] | np.ndarray) -> Any:
    """Return "per round": the median of the counted rounds; NaN without any."""
    values = np.asarray(rounds, float)
    if not len(values):
        return np.full(values.shape[1:], np.nan)
    return np.median(values, axis=0)


def recent(seconds: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the later half of the rounds, at least ten, without the warm-up."""
    steady = counted(np.asarray(seconds, float))
    return steady[-max(LEAST, len(steady) // 2) :]


def pace(seconds: Sequence[float] | np.ndarray) -> float:
    """Return the median time of recent rounds; NaN if no round is done."""
    # The median, because a round may have waited for the server's learning.
    return float(per_round(recent(seconds)))


def rest(seconds: Sequence[float] | np.ndarray, rounds: int) -> float:
    """Return the time for this number of further rounds; NaN before the first is done.

    This uses the mean, because rounds with an evaluation take longer than others, and
    both count.
    """
    known = recent(seconds)
    return rounds * float(known.mean()) if len(known) else float("nan")
