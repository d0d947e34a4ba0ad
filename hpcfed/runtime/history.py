"""Readings over time, as means over moments of equal length. When there are too many
moments, neighbours are merged: a long run takes no more memory than a short one, and no
reading is lost from the means.
"""

from collections.abc import Sequence
from math import ceil, nan
from typing import NamedTuple

import numpy as np

MOST = 960
"""Most moments."""


class Series(NamedTuple):
    """A figure of a rank, of a host, or of an interface of a host."""

    figure: str
    owner: str


class History:
    """Means of series over moments of equal length, which doubles when there are too
    many.
    """

    def __init__(self, series: Sequence[Series], step: float, most: int = MOST) -> None:
        self.series = tuple(series)
        self.step = step
        """Seconds of a moment."""
        self.cost = 0.0
        """CPU seconds that the readings took."""
        self._most = most
        self.sums = np.zeros((0, len(series)))
        """Values times seconds: [moments, series]."""
        self.known = np.zeros((0, len(series)))
        """Seconds of each moment in which a series was known."""
        self.seconds = np.zeros(0)
        """Seconds of each moment that readings cover."""
        self.rounds = np.zeros(0)
        """How many rounds were done at the end of each moment."""

    def add(self, begin: float, end: float, values: np.ndarray, rounds: int) -> None:
        """Add values that held between two times, in seconds since the start."""
        while end > self.step * self._most:
            self.coarsen()
        first = int(begin / self.step)
        # Rounding may make one more of the most.
        self._lengthen(min(ceil(end / self.step), self._most))
        known = np.isfinite(values)
        values = np.where(known, values, 0.0)
        for moment in range(first, len(self.seconds)):
            until = min(end, (moment + 1) * self.step)
            length = until - max(begin, moment * self.step)
            if length > 0:
                self.sums[moment] += length * values
                self.known[moment] += length * known
                self.seconds[moment] += length
            self.rounds[moment] = rounds

    def coarsen(self) -> None:
        """Merge each two neighbours."""
        self.step *= 2
        self._lengthen(len(self.seconds) + len(self.seconds) % 2)
        self.sums = self.sums[::2] + self.sums[1::2]
        self.known = self.known[::2] + self.known[1::2]
        self.seconds = self.seconds[::2] + self.seconds[1::2]
        self.rounds = np.maximum(self.rounds[::2], self.rounds[1::2])

    def means(self) -> np.ndarray:
        """Return the means: [moments, series]; NaN where nothing is known."""
        with np.errstate(invalid="ignore"):
            return np.where(self.known > 0, self.sums / self.known, nan)

    def _lengthen(self, moments: int) -> None:
        """Append empty moments up to this number."""
        more = moments - len(self.seconds)
        if more <= 0:
            return
        # Every second, in which np.pad would take longer than all readings.
        both = np.zeros((more, len(self.series)))
        self.sums = np.concatenate([self.sums, both])
        self.known = np.concatenate([self.known, both])
        self.seconds = np.concatenate([self.seconds, np.zeros(more)])
        self.rounds = np.concatenate([self.rounds, np.zeros(more)])
