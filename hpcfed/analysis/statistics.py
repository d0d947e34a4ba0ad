"""Figures with their uncertainty, from several runs or from the rounds of one."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from math import exp, hypot, inf, isnan, log, nan, sqrt
from statistics import fmean, stdev
from typing import Any

from hpcfed.results.pace import per_round

# scipy.stats is imported where it is used. It makes the process so large that a fork,
# which reading every run needs, takes 11 ms of CPU instead of 3.

CONFIDENCE = 0.95
MOST_SPREAD = 4.0
"""The largest ratio of an interval's ends that is worth printing for times."""
MOST_POWER = 600.0
"""Largest exponent of e, so that such a number times seconds is still finite."""
ONE_RUN = "one run each"
"""The basis of a difference without an interval."""

Measurements = Mapping[tuple[tuple[int, ...], int], float]
"""A figure of several runs, by their seeds and by the number of the repeat."""


@dataclass(frozen=True)
class Estimate:
    """A figure with its confidence interval; the ends are NaN with too few values."""

    centre: float
    low: float = nan
    high: float = nan

    @property
    def bounded(self) -> bool:
        return not (isnan(self.low) or isnan(self.high))

    @property
    def vague(self) -> bool:
        """Whether an interval of times is too wide, as of two noisy repeats."""
        return self.bounded and (self.low <= 0 or self.high > MOST_SPREAD * self.low)

    def scaled(self, factor: float) -> "Estimate":
        """Return the figure in another unit; the factor is positive."""
        return Estimate(*(factor * end for end in astuple(self)))

    def exp(self) -> "Estimate":
        """Return a ratio, from its logarithm."""
        return Estimate(*map(bounded_exp, astuple(self)))

    def log(self) -> "Estimate":
        """Return a ratio on a logarithmic scale; without ends if one is not positive."""
        if not self.bounded or self.low <= 0:
            return Estimate(log(self.centre))
        return Estimate(log(self.centre), log(self.low), log(self.high))


def disjoint(one: Estimate, other: Estimate) -> bool:
    """Tell whether two intervals are apart, as far as both are known."""
    if not (one.bounded and other.bounded):
        return True
    return one.high < other.low or other.high < one.low


def of_runs(values: Sequence[float]) -> Estimate:
    """Estimate a positive figure from independent runs: their geometric mean, by
    Student's t on the logarithms.

    Logarithms, because times are skewed, and because an interval of few runs must not
    reach below zero.
    """
    logs = [log(value) for value in values]
    # The exponential of the mean logarithm is the geometric mean.
    centre = exp(fmean(logs))
    if len(logs) < 2:
        return Estimate(centre)
    factor = bounded_exp(_half_width(logs))
    return Estimate(centre, centre / factor, centre * factor)


def middle(values: Sequence[float]) -> float:
    """Return the geometric mean, as in `of_runs`; the mean if a value is zero."""
    return of_runs(values).centre if min(values) > 0 else fmean(values)


def of_rounds(values: Sequence[float]) -> Estimate:
    """Estimate a figure from the rounds of one run: their median, between order
    statistics that enclose it for any distribution.

    95 % needs at least six rounds. Rounds of one run are more alike than runs are, so
    repeat the run if it matters.
    """
    from scipy import stats

    ordered = sorted(values)
    centre = float(per_round(values))
    tail = (1 - CONFIDENCE) / 2
    # How many values lie below the median is binomial with p = 1/2. Take the largest
    # number of values to cut from each end that leaves 95 % between.
    number = len(ordered)
    cut = int(stats.binom.ppf(tail, number, 0.5))
    # ppf returns the first value at or above the tail; more than it may lie outside.
    if stats.binom.cdf(cut, number, 0.5) > tail:
        cut -= 1
    if cut < 0:
        return Estimate(centre)
    return Estimate(centre, ordered[cut], ordered[-1 - cut])


def of_seeds(
    values: Sequence[float], *, least: float = 0.0, most: float = inf
) -> Estimate:
    """Estimate a figure between known limits, such as an accuracy: the mean, by
    Student's t, with the interval cut at the limits.
    """
    centre = fmean(values)
    if len(values) < 2:
        return Estimate(centre)
    half = _half_width(values)
    # An interval below 0 or above 100 % of accuracy would be nonsense.
    return Estimate(centre, max(least, centre - half), min(most, centre + half))


def ratio(top: Estimate, bottom: Estimate, scale: float = 1.0) -> Estimate:
    """Divide two independent positive figures: log distances add up as squares."""
    centre = scale * top.centre / bottom.centre
    bounded = top.bounded and bottom.bounded
    if not bounded or min(top.low, bottom.low) <= 0:  # no logarithm
        return Estimate(centre)
    # The ratio is low if the top is low and the bottom is high, and vice versa.
    down = hypot(log(top.centre / top.low), log(bottom.high / bottom.centre))
    up = hypot(log(top.high / top.centre), log(bottom.centre / bottom.low))
    return Estimate(centre, centre * bounded_exp(-down), centre * bounded_exp(up))


def difference(
    one: Mapping[Any, float], other: Mapping[Any, float], *, paired: bool | None = None
) -> Estimate:
    """Subtract the means of two sets of seeds: paired if both have the same seeds,
    unless told otherwise, else by Welch's t, which allows different variances.

    Equal seeds have equal data and cohorts, so their differences vary less than the
    values themselves.
    """
    centre = fmean(one.values()) - fmean(other.values())
    if min(len(one), len(other)) < 2:
        return Estimate(centre)
    if one.keys() == other.keys() if paired is None else paired:
        half = _half_width([one[seed] - other[seed] for seed in one])
    else:
        half = _welch_half_width(list(one.values()), list(other.values()))
    return Estimate(centre, centre - half, centre + half)


@dataclass(frozen=True)
class Difference:
    """How B differs from A: a difference, or a ratio."""

    change: Estimate
    basis: str
    """What the interval is based on, in a few words."""
    over_runs: bool = False
    """Whether the interval covers the noise from run to run."""


def subtract(before: Measurements, after: Measurements) -> Difference:
    """Subtract the mean of A's measurements from that of B's."""
    # With one seed, all pairs would be repeats of each other, paired by chance.
    several = len({seeds for seeds, _ in before}) > 1
    if several and before.keys() == after.keys():
        change = difference(after, before, paired=True)
        return Difference(change, f"{len(before)} pairs of runs", over_runs=True)
    change = difference(after, before, paired=False)
    if not change.bounded:
        return Difference(change, ONE_RUN)
    return Difference(change, f"{len(before)} and {len(after)} runs", over_runs=True)


def divide(before: Measurements, after: Measurements) -> Difference:
    """Divide B's geometric mean by A's: times and sizes are skewed."""
    if min(*before.values(), *after.values()) > 0:
        found = subtract(_logs(before), _logs(after))
        return replace(found, change=found.change.exp())
    # Zero has no logarithm: a method may send nothing.
    bottom, top = fmean(before.values()), fmean(after.values())
    if bottom:
        return Difference(Estimate(top / bottom), ONE_RUN)
    return Difference(Estimate(inf if top else 1.0), ONE_RUN)


def _logs(measurements: Measurements) -> Measurements:
    return {key: log(value) for key, value in measurements.items()}


def mean_change(changes: Sequence[Estimate], *, over_runs: bool) -> Difference:
    """Return the mean change of exactly these points.

    If each point knows its own noise from run to run, distances to the ends add up as
    squares. Otherwise the interval comes from the spread of the points.
    """
    number = len(changes)
    centres = [change.centre for change in changes]
    if over_runs and all(change.bounded for change in changes):
        centre = fmean(centres)
        down = hypot(*(change.centre - change.low for change in changes))
        up = hypot(*(change.high - change.centre for change in changes))
        # Errors of independent points add up as squares, and the mean divides by their
        # number.
        whole = Estimate(centre, centre - down / number, centre + up / number)
        return Difference(whole, f"runs of {number} points", over_runs=True)
    spread = of_seeds(centres, least=-inf)
    return Difference(spread, f"spread of {number} points", over_runs=True)


def _welch_half_width(one: Sequence[float], other: Sequence[float]) -> float:
    """Return half the width of the interval of a difference of independent means."""
    from scipy import stats

    # Variances of the two means.
    parts = [stdev(values) ** 2 / len(values) for values in (one, other)]
    variance = sum(parts)
    if variance == 0:
        return 0.0
    # Degrees of freedom by Welch and Satterthwaite.
    freedom = variance**2 / (
        parts[0] ** 2 / (len(one) - 1) + parts[1] ** 2 / (len(other) - 1)
    )
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * sqrt(variance)


def bounded_exp(power: float) -> float:
    """Return e to a power, limited to the range of floats: an interval from a few
    figures that are far apart may exceed it. NaN stays.
    """
    return power if isnan(power) else exp(max(-MOST_POWER, min(power, MOST_POWER)))


def _half_width(values: Sequence[float]) -> float:
    """Return half the width of the confidence interval of the mean, by Student's t."""
    from scipy import stats

    number = len(values)
    quantile = (1 + CONFIDENCE) / 2
    t = float(stats.t.ppf(quantile, number - 1))
    return t * stdev(values) / sqrt(number)
