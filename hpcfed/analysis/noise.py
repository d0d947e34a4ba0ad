"""Noise: points whose times suggest that something else ran on the machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import isnan, nan
from statistics import fmean, stdev

import numpy as np

from hpcfed.analysis.groups import Group, Process
from hpcfed.analysis.statistics import Estimate, of_rounds
from hpcfed.runtime.timer import PHASES

MOST_VARIATION = 0.10
"""A machine counts as quiet up to this coefficient of variation of repeats' medians."""
MOST_DRIFT = 0.15
"""Up to this change from the first to the last third of a run's rounds, it counts as
quiet.
"""
LEAST_ROUNDS = 18
"""Fewest counted rounds needed to check for drift: six in each third, the fewest for an
interval.
"""


@dataclass(frozen=True)
class Noise:
    """A point with unreliable times."""

    group: Group
    variation: float
    """Standard deviation of repeats' medians divided by their mean; NaN unless too
    large.
    """
    drift: float
    """Largest relative change within a run; NaN unless too large."""


def noisy(every: Sequence[Group]) -> list[Noise]:
    """Find the points whose repeats differ, or whose runs became slower or faster."""
    found = []
    for group in every:
        variation = _variation(group)
        drift = _drift(group)
        if not (isnan(variation) and isnan(drift)):
            found.append(Noise(group, variation, drift))
    return found


def _variation(group: Group) -> float:
    """Return how much repeats differ, if more than a quiet machine would explain."""
    if len(group.processes) < 2:
        return nan
    medians = [process.round_seconds for process in group.processes]
    variation = stdev(medians) / fmean(medians)
    if variation <= MOST_VARIATION or not _apart(group.processes):
        return nan
    return variation


def _apart(processes: Sequence[Process]) -> bool:
    """Tell whether two repeats differ by more than their own rounds do.

    Medians of few rounds differ on a quiet machine, too. If rounds are too few for an
    interval, use their spread.
    """
    inside = [of_rounds(list(process.seconds)) for process in processes]
    return any(_disjoint(one, other) for one, other in combinations(inside, 2))


def _disjoint(one: Estimate, other: Estimate) -> bool:
    if not (one.bounded and other.bounded):
        return True
    return one.high < other.low or other.high < one.low


def _drift(group: Group) -> float:
    """Return the largest change of local training within a run, if beyond the noise of
    its rounds.

    Only training is checked: other phases may change because of the method, for example
    when a server begins to learn.
    """
    largest = nan
    for process in group.processes:
        # A round waits for its slowest rank.
        train = process.phases[:, :, PHASES.index("train")].max(1)
        if len(train) < LEAST_ROUNDS:
            continue
        parts = np.array_split(train, 3)
        first, _, last = (of_rounds(part.tolist()) for part in parts)
        if first.centre <= 0 or not _disjoint(first, last):
            continue
        change = abs(last.centre / first.centre - 1)
        # `not largest > change` is also true while `largest` is NaN.
        if change > MOST_DRIFT and not largest > change:
            largest = change
    return largest
