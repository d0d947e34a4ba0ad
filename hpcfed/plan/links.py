"""What ranks take to exchange bytes, by the usual formulas of rings."""

from dataclasses import dataclass

import numpy as np

from hpcfed.plan.constants import LinkPoint
from hpcfed.plan.fits import least_squares


@dataclass(frozen=True)
class LinkSpeed:
    """What joins two ranks."""

    bytes_per_second: float
    latency: float
    """Seconds of an empty message."""
    source: str
    """Where these come from, for the reader of a plan."""


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
        # A ring whose latency is 1 takes its turns, and its bytes at one byte a second.
        in_bytes = ring_allreduce(point.bytes, point.ranks, unit) - turns
        costs.append([turns, in_bytes])
        seconds.append(point.seconds)
    latency, per_byte = least_squares(np.array(costs), np.array(seconds))
    ranks = max(point.ranks for point in points)
    speed = 1 / per_byte if per_byte > 0 else float("inf")
    return LinkSpeed(speed, float(latency), f"measured between {ranks} ranks here")
