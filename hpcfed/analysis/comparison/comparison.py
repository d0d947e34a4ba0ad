"""A and B side by side: what changed, the points that both have, and a summary over all
of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from math import hypot, inf, log
from statistics import fmean

from hpcfed.analysis.choices import distinguish
from hpcfed.analysis.comparison.changes import (
    Change,
    changed_as_a_whole,
    code_changes,
    option_changes,
)
from hpcfed.analysis.comparison.difference import ONE_RUN, Difference
from hpcfed.analysis.comparison.points import Figure, PointPair, matched
from hpcfed.analysis.groups import Group
from hpcfed.analysis.statistics import Estimate, bounded_exp, of_seeds


@dataclass(frozen=True)
class Comparison:
    names: tuple[str, str]
    """The paths of A and B."""
    options: list[Change]
    code: list[Change]
    """What changed in code, versions and machines."""
    points: list[PointPair]
    """At least one."""
    only_before: list[Group]
    """Points that only A has."""
    only_after: list[Group]
    """Points that only B has."""

    @cached_property
    def costs(self) -> list[Figure]:
        """Seconds, memory, bytes and energy of a round, over all points."""
        return _overall(self.points, lambda point: point.costs)

    @cached_property
    def phases(self) -> list[Figure]:
        """Seconds of each phase, over all points."""
        return _overall(self.points, lambda point: point.phases)

    @cached_property
    def headlines(self) -> list[Figure]:
        """Accuracies, or the task's main metric, over all points."""
        return _overall(self.points, lambda point: point.headlines)


def compare(
    names: tuple[str, str], before: Sequence[Group], after: Sequence[Group]
) -> Comparison | None:
    """Compare groups of A with groups of B; None if they have no point in common."""
    if not before or not after:
        return None
    changed = changed_as_a_whole(before, after)
    pairs, only_before, only_after = matched(before, after, changed)
    if not pairs:
        return None
    # Options that changed as a whole have one value in all of A: they are not in keys.
    keys = distinguish([group.options for group, _ in pairs])
    points = []
    for (ours, theirs), key in zip(pairs, keys, strict=True):
        points.append(PointPair(ours, theirs, key.without(*changed)))
    return Comparison(
        names,
        option_changes(before, after),
        code_changes(before, after),
        points,
        only_before,
        only_after,
    )


def _overall(
    points: Sequence[PointPair], figures_of: Callable[[PointPair], Sequence[Figure]]
) -> list[Figure]:
    """Return each figure over the points that have it, in the order of the first."""
    by_name: dict[str, list[Figure]] = {}
    for point in points:
        for figure in figures_of(point):
            by_name.setdefault(figure.name, []).append(figure)
    return [overall(figures) for figures in by_name.values()]


def overall(figures: Sequence[Figure]) -> Figure:
    """Return the mean change over points; for ratios, the geometric mean."""
    first = figures[0]
    if len(figures) == 1:
        return first
    whole = replace(
        first,
        before=fmean(figure.before for figure in figures),
        after=fmean(figure.after for figure in figures),
    )
    changes = [figure.change for figure in figures]
    over_runs = all(figure.found.over_runs for figure in figures)
    ratios = bool(first.neutral)
    if not ratios:
        return replace(whole, found=_mean(changes, over_runs=over_runs))
    centres = [change.centre for change in changes]
    if min(centres) <= 0 or max(centres) == inf:  # a side of a point sends nothing
        return replace(whole, found=Difference(Estimate(fmean(centres)), ONE_RUN))
    found = _mean([_log(change) for change in changes], over_runs=over_runs)
    if first.counted and not over_runs:
        # Differences between points are not noise.
        found = Difference(Estimate(found.change.centre), f"{len(figures)} points")
    change = Estimate(*(bounded_exp(end) for end in astuple(found.change)))
    return replace(whole, found=replace(found, change=change))


def _log(change: Estimate) -> Estimate:
    """Return a ratio on a logarithmic scale."""
    if not change.bounded or change.low <= 0:
        return Estimate(log(change.centre))
    return Estimate(log(change.centre), log(change.low), log(change.high))


def _mean(changes: Sequence[Estimate], *, over_runs: bool) -> Difference:
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
        whole = Estimate(centre, centre - down / number, centre + up / number)
        return Difference(whole, f"runs of {number} points", over_runs=True)
    spread = of_seeds(centres, least=-inf)
    return Difference(spread, f"spread of {number} points", over_runs=True)
