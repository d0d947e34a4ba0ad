"""How two sides differ in a figure, with its uncertainty: over pairs of runs where both
have the same seeds, by Welch's t otherwise.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from math import exp, inf, isfinite, log, nan
from statistics import fmean

from hpcfed.analysis import statistics
from hpcfed.analysis.statistics import MOST_POWER, Estimate

ONE_RUN = "one run each"
"""How a difference without an interval was found."""


@dataclass(frozen=True)
class Measurement:
    """What one process has measured."""

    seeds: tuple[int, ...]
    value: float


@dataclass(frozen=True)
class Difference:
    """What B has more than A: a difference, or a ratio."""

    change: Estimate
    basis: str
    """What the interval is about, in a few words."""
    over_runs: bool = False
    """Whether the interval holds the noise from run to run."""


Measurements = Sequence[Measurement]


def difference(before: Measurements, after: Measurements) -> Difference:
    """Subtract the mean of A's readings from that of B's."""
    if _same_seeds(before, after):
        change = statistics.difference(_by_seed(after), _by_seed(before))
        return Difference(change, f"{len(before)} pairs of runs", over_runs=True)
    # Different keys on both sides: nothing is paired.
    change = statistics.difference(_by_number(after, "B"), _by_number(before, "A"))
    if not change.bounded:
        return Difference(change, ONE_RUN)
    runs = f"{len(before)} and {len(after)} runs"
    return Difference(change, runs, over_runs=True)


def ratio(before: Measurements, after: Measurements) -> Difference:
    """Divide B's geometric mean by A's: a difference of logarithms, because times and
    sizes are skewed.
    """
    smallest = min(*_values(before), *_values(after))
    if smallest <= 0:  # which has no logarithm
        return Difference(Estimate(_plain_ratio(before, after)), ONE_RUN)
    found = difference(_logs(before), _logs(after))
    change = Estimate(*(power(end) for end in astuple(found.change)))
    return Difference(change, found.basis, found.over_runs)


def _same_seeds(before: Measurements, after: Measurements) -> bool:
    """Whether both sides have the same seeds, and more than one: repeats of one seed
    have no reason to be paired in any order.
    """
    ours = sorted(reading.seeds for reading in before)
    theirs = sorted(reading.seeds for reading in after)
    return ours == theirs and len(set(ours)) > 1


def _by_seed(readings: Measurements) -> dict[object, float]:
    """Return values by seed and repeat: data and clients of a seed are the same on both
    sides, so what they add to a figure cancels out.
    """
    repeats: Counter[tuple[int, ...]] = Counter()
    found: dict[object, float] = {}
    for reading in readings:
        found[reading.seeds, repeats[reading.seeds]] = reading.value
        repeats[reading.seeds] += 1
    return found


def _by_number(readings: Measurements, side: str) -> dict[object, float]:
    return {(side, number): one.value for number, one in enumerate(readings)}


def _plain_ratio(before: Measurements, after: Measurements) -> float:
    """Divide means where a reading is zero, as the bytes of a method that sends nothing."""
    bottom, top = fmean(_values(before)), fmean(_values(after))
    if bottom:
        return top / bottom
    return inf if top else 1.0


def _values(readings: Measurements) -> list[float]:
    return [reading.value for reading in readings]


def _logs(readings: Measurements) -> list[Measurement]:
    return [Measurement(reading.seeds, log(reading.value)) for reading in readings]


def power(of_e: float) -> float:
    """Return e to a power, cut where floats end; NaN stays."""
    return exp(max(-MOST_POWER, min(of_e, MOST_POWER))) if isfinite(of_e) else nan
