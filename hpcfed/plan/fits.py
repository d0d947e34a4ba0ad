"""Sums of few costs, fitted to measured seconds, and the range of what they predict."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from hpcfed.analysis.costmodel import nonnegative

T = TypeVar("T")
LEAST_WIDTH = 0.05
"""Half the width that every interval has at least: two calls on one machine differ by
as much.
"""


@dataclass(frozen=True)
class Range:
    """A prediction and the interval around it."""

    middle: float
    low: float
    high: float

    def __add__(self, other: "Range") -> "Range":
        return Range(
            self.middle + other.middle, self.low + other.low, self.high + other.high
        )

    def __mul__(self, factor: float) -> "Range":
        return Range(self.middle * factor, self.low * factor, self.high * factor)


def exactly(value: float) -> Range:
    """Return a range of one value."""
    return Range(value, value, value)


def least_squares(costs: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Find coefficients ≥ 0 with the least squares of relative errors."""
    return nonnegative(costs / seconds[:, None])


def ranged(
    points: Sequence[T],
    predict: Callable[[Sequence[T]], float],
    *others: Callable[[], float],
    keep: Callable[[Sequence[T]], bool],
    width: float = LEAST_WIDTH,
) -> Range:
    """Predict from all points; the interval spans what is predicted without any one of
    them, where the rest is enough to `keep`, what `others` predict, and the share
    `width` either way.
    """
    middle = predict(points)
    found = [middle * (1 - width), middle * (1 + width)]
    found += [other() for other in others]
    for number in range(len(points)):
        rest = [*points[:number], *points[number + 1 :]]
        if keep(rest):
            found.append(predict(rest))
    return Range(middle, min(found), max(found))
