"""How fast something goes, and how long the rest of it will take."""

from collections.abc import Sequence
from math import isfinite

import numpy as np

LEAST = 10
"""Rounds that a pace is a mean over, as soon as there are so many."""


def pace(seconds: Sequence[float] | np.ndarray) -> float:
    """Return the seconds of a round to expect: the mean over the later half of those
    that are done, and over at least ten. NaN when none is done.

    A mean, because rounds with an evaluation take longer than others, and both count.
    """
    # The first round warms up.
    steady = np.asarray(seconds[1:] if len(seconds) > 1 else seconds, float)
    if not len(steady):
        return float("nan")
    recent = max(LEAST, len(steady) // 2)
    return float(steady[-recent:].mean())


def duration(seconds: float) -> str:
    """Return a time as a clock shows it: `0:07`, `1:02:03` or `3 d 04:00`."""
    if not isfinite(seconds):
        return "?"
    whole = round(max(0.0, seconds))
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02}:{minute:02}"
    if hours:
        return f"{hour}:{minute:02}:{second:02}"
    return f"{minute}:{second:02}"


def short_seconds(seconds: float) -> str:
    """Return the time of a round: `1.25 s`, or `41.3 ms`."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"
