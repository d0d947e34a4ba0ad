"""How two sides differ in a figure, with its uncertainty: over pairs of runs if both
have the same seeds, otherwise by Welch's t.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from math import inf, log
from statistics import fmean

from hpcfed.analysis.statistics import Estimate, bounded_exp, difference

ONE_RUN = "one run each"
"""The basis of a difference without an interval."""


@dataclass(frozen=True)
class Measurement:
    """A measurement of one process."""

    seeds: tuple[int, ...]
    value: float


@dataclass(frozen=True)
class Difference:
    """How B differs from A: a difference, or a ratio."""

    change: Estimate
    basis: str
    """What the interval is based on, in a few words."""
    over_runs: bool = False
    """Whether the interval covers the noise from run to run."""


Measurements = Sequence[Measurement]


def subtract(before: Measurements, after: Measurements) -> Difference:
    """Subtract the mean of A's measurements from that of B's."""
    if _same_seeds(before, after):
        change = difference(_by_seed(after), _by_seed(before))
        return Difference(change, f"{len(before)} pairs of runs", over_runs=True)
    # Different keys on both sides, so nothing is paired.
    change = difference(_by_number(after, "B"), _by_number(before, "A"))
    if not change.bounded:
        return Difference(change, ONE_RUN)
    runs = f"{len(before)} and {len(after)} runs"
    return Difference(change, runs, over_runs=True)


def divide(before: Measurements, after: Measurements) -> Difference:
    """Divide B's geometric mean by A's: a difference of logarithms, because times and
    sizes are skewed.
    """
    smallest = min(*_values(before), *_values(after))
    if smallest <= 0:  # has no logarithm
        return Difference(Estimate(_plain_ratio(before, after)), ONE_RUN)
    found = subtract(_logs(before), _logs(after))
    change = Estimate(*(bounded_exp(end) for end in astuple(found.change)))
    return Difference(change, found.basis, found.over_runs)


def _same_seeds(before: Measurements, after: Measurements) -> bool:
    """Tell whether both sides have the same seeds, and more than one. Repeats of one
    seed cannot be paired in any meaningful order.
    """
    ours = sorted(measurement.seeds for measurement in before)
    theirs = sorted(measurement.seeds for measurement in after)
    return ours == theirs and len(set(ours)) > 1


def _by_seed(measurements: Measurements) -> dict[object, float]:
    """Return values by seed and repeat. A seed has the same data and clients on both
    sides, so their effect on a figure cancels out.
    """
    repeats: Counter[tuple[int, ...]] = Counter()
    found: dict[object, float] = {}
    for measurement in measurements:
        found[measurement.seeds, repeats[measurement.seeds]] = measurement.value
        repeats[measurement.seeds] += 1
    return found


def _by_number(measurements: Measurements, side: str) -> dict[object, float]:
    return {(side, number): one.value for number, one in enumerate(measurements)}


def _plain_ratio(before: Measurements, after: Measurements) -> float:
    """Divide the means if a measurement is zero, such as the bytes of a method that
    sends nothing.
    """
    bottom, top = fmean(_values(before)), fmean(_values(after))
    if bottom:
        return top / bottom
    return inf if top else 1.0


def _values(measurements: Measurements) -> list[float]:
    return [measurement.value for measurement in measurements]


def _logs(measurements: Measurements) -> list[Measurement]:
    return [
        Measurement(measurement.seeds, log(measurement.value))
        for measurement in measurements
    ]
