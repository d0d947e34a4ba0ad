"""The figure of merit of several runs: a trimmed mean, with its interval."""

from collections.abc import Sequence
from math import log, sqrt
from statistics import fmean, stdev
from typing import Literal

from hpcfed.analysis.statistics import CONFIDENCE, Estimate, bounded_exp

TRIMMED_PART = 5
"""One of so many runs is dropped at either end: of five the fastest and the slowest."""
INTERVAL = (
    "95 %, Student's t of the logarithms; with dropped runs by Tukey and McLaughlin: "
    "dropped runs count as their neighbours in the variance"
)
USUAL_POWER = 0.8
"""How likely a difference is told apart that we call detectable."""


def dropped(number: int) -> int:
    """Return how many of the fastest runs do not count; as many of the slowest."""
    return number // TRIMMED_PART


def of_times(seconds: Sequence[float]) -> Estimate:
    """Return the geometric mean of times without the fastest and the slowest fifth, with
    its interval.
    """
    return trimmed([log(value) for value in seconds]).exp()


def trimmed(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Return the mean without the least and the largest fifth of the values.

    Its variance is that of all values, after those that were dropped have taken the
    place of their neighbours, and it has as many degrees of freedom as are kept, less
    one. Without dropping any, this is Student's t.
    """
    ordered = sorted(values)
    number = len(ordered)
    cut = dropped(number)
    kept = ordered[cut : number - cut]
    centre = fmean(kept)
    if number < 2:
        return Estimate(centre)
    winsorised = cut * kept[:1] + kept + cut * kept[-1:]
    share_kept = len(kept) / number
    error = stdev(winsorised) / (share_kept * sqrt(number))
    reach = _quantile((1 + confidence) / 2, number) * error
    return Estimate(centre, centre - reach, centre + reach)


def ratio(
    before: Sequence[float], after: Sequence[float], confidence: float = CONFIDENCE
) -> Estimate:
    """Return how many times as long the second machine's runs take, from the pairs of
    runs with the same seed, which do the same work.
    """
    pairs = zip(before, after, strict=True)
    logs = [log(later / earlier) for earlier, later in pairs]
    return trimmed(logs, confidence).exp()


def verdict_of(found: Estimate) -> Literal["slower", "faster", "within noise"]:
    """Say whether a ratio is told apart from noise."""
    if not found.bounded or found.low <= 1 <= found.high:
        return "within noise"
    return "slower" if found.low > 1 else "faster"


def detectable(found: Estimate, number: int, confidence: float = CONFIDENCE) -> float:
    """Return the ratio of times that four of five such measurements tell apart, from the
    ratio of `number` pairs; NaN without an interval.
    """
    reach = log(found.high / found.centre) if found.low > 0 else float("nan")
    limit = _quantile((1 + confidence) / 2, number)
    # The interval must begin above 1 although the centre falls below the truth.
    return bounded_exp(reach * (1 + _quantile(USUAL_POWER, number) / limit))


def _quantile(probability: float, number: int) -> float:
    """Return Student's quantile for the runs that are kept of a number of runs."""
    from scipy import stats

    return float(stats.t.ppf(probability, number - 2 * dropped(number) - 1))
