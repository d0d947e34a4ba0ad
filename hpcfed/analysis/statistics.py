"""Figures with their uncertainty: what several runs of a point, or the rounds of one, say
about it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, hypot, inf, isnan, log, nan, sqrt
from statistics import fmean, stdev
from typing import Any

from hpcfed.results.pace import per_round

# scipy.stats is imported where it is used. It makes the process so large that a fork,
# which reading every run needs, takes 11 ms of CPU instead of 3.

CONFIDENCE = 0.95
MOST_SPREAD = 4.0
"""How many times its lower end the upper end of an interval of times may be, so that it
is worth printing.
"""
MOST_POWER = 600.0
"""Largest exponent of e, so that a product of such numbers with seconds is still
finite.
"""


@dataclass(frozen=True)
class Estimate:
    """A figure with its confidence interval; the ends are NaN where there is too little
    to tell.
    """

    centre: float
    low: float = nan
    high: float = nan

    @property
    def bounded(self) -> bool:
        return not (isnan(self.low) or isnan(self.high))

    @property
    def vague(self) -> bool:
        """Whether an interval of times is too wide to say anything, as that of two
        repeats on a busy machine.
        """
        return self.bounded and (self.low <= 0 or self.high > MOST_SPREAD * self.low)


def of_runs(values: Sequence[float]) -> Estimate:
    """Estimate a positive figure from independent runs: their geometric mean, by
    Student's t on the logarithms.

    Logarithms, because times are skewed, and because an interval of few runs must not
    reach below zero.
    """
    logs = [log(value) for value in values]
    # Back from logarithms, their mean is the geometric mean.
    centre = exp(fmean(logs))
    if len(logs) < 2:
        return Estimate(centre)
    factor = bounded_exp(_half_width(logs))
    return Estimate(centre, centre / factor, centre * factor)


def middle(values: Sequence[float]) -> float:
    """Return the geometric mean, as `of_runs` has it; the mean where something is zero."""
    return of_runs(values).centre if min(values) > 0 else fmean(values)


def of_rounds(values: Sequence[float]) -> Estimate:
    """Estimate a figure from the rounds of one run: their median, between the order
    statistics that hold it, whatever the distribution.

    Six rounds are the fewest for 95 %. Rounds of one run are more alike than runs are:
    repeat, where it matters.
    """
    from scipy import stats

    ordered = sorted(values)
    centre = float(per_round(values))
    tail = (1 - CONFIDENCE) / 2
    # How many values lie below the median is binomial with p = 1/2. Take the largest
    # number of values to cut from each end that leaves 95 % between.
    number = len(ordered)
    cut = int(stats.binom.ppf(tail, number, 0.5))
    if stats.binom.cdf(cut, number, 0.5) > tail:
        cut -= 1
    if cut < 0:
        return Estimate(centre)
    return Estimate(
        centre,
        ordered[cut],
        ordered[-1 - cut],
    )


def of_seeds(
    values: Sequence[float], *, least: float = 0.0, most: float = inf
) -> Estimate:
    """Estimate a figure between known limits, such as an accuracy: the mean, by
    Student's t, cut at the limits.
    """
    centre = fmean(values)
    if len(values) < 2:
        return Estimate(centre)
    half = _half_width(values)
    # An interval beyond 0 or 100 % of accuracy would be nonsense.
    return Estimate(
        centre,
        max(least, centre - half),
        min(most, centre + half),
    )


def ratio(top: Estimate, bottom: Estimate, scale: float = 1.0) -> Estimate:
    """Divide two independent positive figures: distances to the ends, on the scale of
    logarithms, add up as squares.
    """
    centre = scale * top.centre / bottom.centre
    bounded = top.bounded and bottom.bounded
    if not bounded or min(top.low, bottom.low) <= 0:  # which have no logarithm
        return Estimate(centre)
    # The ratio is low where the top is low and the bottom is high, and the reverse.
    down = hypot(
        log(top.centre / top.low),
        log(bottom.high / bottom.centre),
    )
    up = hypot(
        log(top.high / top.centre),
        log(bottom.centre / bottom.low),
    )
    return Estimate(
        centre,
        centre * bounded_exp(-down),
        centre * bounded_exp(up),
    )


def difference(one: Mapping[Any, float], other: Mapping[Any, float]) -> Estimate:
    """Subtract the means of two sets of seeds: paired where both have the same seeds,
    otherwise by Welch's t, which lets each have a spread of its own.

    Equal seeds have equal data and cohorts, so their differences vary less than they do.
    """
    centre = fmean(one.values()) - fmean(other.values())
    if min(len(one), len(other)) < 2:
        return Estimate(centre)
    if one.keys() == other.keys():
        half = _half_width([one[seed] - other[seed] for seed in one])
    else:
        half = _welch_half_width(list(one.values()), list(other.values()))
    return Estimate(centre, centre - half, centre + half)


def _welch_half_width(one: Sequence[float], other: Sequence[float]) -> float:
    """Return half of the confidence interval of a difference of independent means."""
    from scipy import stats

    # Variances of the two means.
    parts = [stdev(values) ** 2 / len(values) for values in (one, other)]
    variance = sum(parts)
    if variance == 0:
        return 0.0
    # Welch and Satterthwaite's degrees of freedom.
    freedom = variance**2 / (
        parts[0] ** 2 / (len(one) - 1) + parts[1] ** 2 / (len(other) - 1)
    )
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * sqrt(variance)


def bounded_exp(power: float) -> float:
    """Return e to a power, cut where floats end: an interval of few figures that are far
    apart may reach beyond. NaN stays.
    """
    return power if isnan(power) else exp(max(-MOST_POWER, min(power, MOST_POWER)))


def _half_width(values: Sequence[float]) -> float:
    """Return half of the confidence interval of the mean, by Student's t."""
    from scipy import stats

    number = len(values)
    quantile = (1 + CONFIDENCE) / 2
    t = float(stats.t.ppf(quantile, number - 1))
    return t * stdev(values) / sqrt(number)
