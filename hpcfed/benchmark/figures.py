"""The figure of merit of several runs: a trimmed mean, with its interval."""

from collections.abc import Sequence
from math import log, sqrt
from statistics import fmean, stdev

from hpcfed.analysis.statistics import CONFIDENCE, Estimate

TRIMMED_FROM = 5
"""From this number of runs on, the fastest and the slowest are dropped."""
INTERVAL = (
    "95 %, Student's t of the logarithms; with dropped runs by Tukey and McLaughlin: "
    "dropped runs count as their neighbours in the variance"
)


def of_times(seconds: Sequence[float]) -> Estimate:
    """Return the geometric mean without the fastest and the slowest of five or more
    times, with its interval.
    """
    return trimmed([log(value) for value in seconds]).exp()


def trimmed(values: Sequence[float]) -> Estimate:
    """Return the mean without the least and the largest of five or more values.

    Its variance is that of all values, after those that were dropped have taken the
    place of their neighbours, and it has as many degrees of freedom as are kept, less
    one. Without dropping any, this is Student's t.
    """
    from scipy import stats

    ordered = sorted(values)
    number = len(ordered)
    cut = int(number >= TRIMMED_FROM)
    kept = ordered[cut : number - cut]
    centre = fmean(kept)
    if number < 2:
        return Estimate(centre)
    winsorised = cut * kept[:1] + kept + cut * kept[-1:]
    share_kept = len(kept) / number
    error = stdev(winsorised) / (share_kept * sqrt(number))
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(kept) - 1)) * error
    return Estimate(centre, centre - reach, centre + reach)


def ratio(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """Return how many times as long the second machine's runs take, from the pairs of
    runs with the same seed, which do the same work.
    """
    pairs = zip(before, after, strict=True)
    return trimmed([log(later / earlier) for earlier, later in pairs]).exp()
