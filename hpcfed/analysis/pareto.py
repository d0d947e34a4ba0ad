"""Pareto frontiers: points that nobody beats in both score and cost."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from hpcfed.analysis.choices import Combination
from hpcfed.analysis.groups import Group
from hpcfed.analysis.outcomes import COSTS, Measure, RunCost, measure
from hpcfed.analysis.statistics import Estimate
from hpcfed.analysis.swept import Swept, problem


@dataclass(frozen=True)
class Weighed:
    """A point with its score and its cost."""

    group: Group
    score: Estimate
    cost: Estimate


@dataclass(frozen=True)
class Frontier:
    """Points of one problem, weighed against one cost."""

    problem: Combination
    judged: Measure
    cost: RunCost
    points: list[Weighed]
    """All of them, cheapest first."""
    best: list[Weighed]
    """Those on the frontier, cheapest first: each is better than all cheaper ones."""


def frontiers(every: Sequence[Group], options: Sequence[Swept]) -> list[Frontier]:
    """Find the frontiers of all problems that several choices of options were tried on.

    Scores of other data, or shared out among clients otherwise, do not compare.
    """
    problems: dict[Combination, list[Group]] = defaultdict(list)
    for group in every:
        problems[problem(group, options)].append(group)
    found = []
    for posed, members in problems.items():
        judged = measure(members)
        # Ranks change the cost alone: a frontier needs choices of other things.
        several = len({group.key for group in members}) > 1
        if judged is None or not several:
            continue
        for cost in COSTS.values():
            points = _weighed(members, judged, cost)
            if len(points) > 1:
                best = _frontier(points, judged)
                found.append(Frontier(posed, judged, cost, points, best))
    return found


def _weighed(members: Sequence[Group], judged: Measure, cost: RunCost) -> list[Weighed]:
    """Return the points whose score and cost are known, cheapest first."""
    points = []
    for group in members:
        point = Weighed(group, judged.estimate(group), cost.of(group))
        if isfinite(point.score.centre) and point.cost.centre > 0:
            points.append(point)
    return sorted(points, key=lambda point: point.cost.centre)


def _frontier(points: Sequence[Weighed], judged: Measure) -> list[Weighed]:
    best: list[Weighed] = []
    for point in points:
        if not best:
            best.append(point)
            continue
        last = best[-1]
        if not judged.better(point.score.centre, last.score.centre):
            continue
        # Of two that cost the same, the better one stays.
        if point.cost.centre == last.cost.centre:
            best.pop()
        best.append(point)
    return best
