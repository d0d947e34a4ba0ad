"""Sums of a few costs, fitted to measured seconds, and intervals of predictions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from hpcfed.analysis.costmodel import nonnegative
from hpcfed.plan.constants import LinkPoint

T = TypeVar("T")
LEAST_WIDTH = 0.05
"""Half the minimum width of an interval: two calls on one machine differ by as much."""


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
    """Find coefficients ≥ 0 that minimise the squared relative errors."""
    return nonnegative(costs / seconds[:, None])


def ranged(
    points: Sequence[T],
    predict: Callable[[Sequence[T]], float],
    *others: Callable[[], float],
    keep: Callable[[Sequence[T]], bool],
    width: float = LEAST_WIDTH,
) -> Range:
    """Predict from all points. The interval covers the predictions without any one of
    them, if `keep` accepts the rest, the predictions of `others`, and the share `width`
    either way.
    """
    middle = predict(points)
    found = [middle * (1 - width), middle * (1 + width)]
    found += [other() for other in others]
    for number in range(len(points)):
        rest = [*points[:number], *points[number + 1 :]]
        if keep(rest):
            found.append(predict(rest))
    return Range(middle, min(found), max(found))


# Time to exchange bytes between ranks, by the usual formulas for rings.


@dataclass(frozen=True)
class LinkSpeed:
    """The connection between two ranks."""

    bytes_per_second: float
    latency: float
    """Seconds of an empty message."""
    source: str
    """Where these numbers come from, for the reader of a plan."""


ASSUMED = LinkSpeed(10e9, 20e-6, "assumed: 10 GB/s and 20 µs; say --link and --latency")


def ring_pass(size: float, ranks: int, link: LinkSpeed) -> float:
    """Return the seconds of a reduce-scatter, or of an all-gather, of `size` bytes.

    In each of n − 1 turns every rank sends one n-th of the bytes to its neighbour.
    """
    if ranks == 1:
        return 0.0
    turns = ranks - 1
    return turns * (link.latency + size / ranks / link.bytes_per_second)


def ring_allreduce(size: float, ranks: int, link: LinkSpeed) -> float:
    """Return the seconds of an all-reduce: a reduce-scatter, then an all-gather."""
    return 2 * ring_pass(size, ranks, link)


def measured_link(points: tuple[LinkPoint, ...]) -> LinkSpeed | None:
    """Fit latency and speed to all-reduces between ranks of this machine."""
    if len(points) < 2:
        return None
    unit = LinkSpeed(1.0, 1.0, "")
    costs, seconds = [], []
    for point in points:
        turns = 2 * (point.ranks - 1)
        # The `unit` link has latency 1 and one byte per second, so its time is the
        # number of turns plus the bytes.
        in_bytes = ring_allreduce(point.bytes, point.ranks, unit) - turns
        costs.append([turns, in_bytes])
        seconds.append(point.seconds)
    latency, per_byte = least_squares(np.array(costs), np.array(seconds))
    ranks = max(point.ranks for point in points)
    speed = 1 / per_byte if per_byte > 0 else float("inf")
    return LinkSpeed(speed, float(latency), f"measured between {ranks} ranks here")
