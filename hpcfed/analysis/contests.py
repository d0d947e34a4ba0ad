"""Who is best: methods under equal conditions, and points that no other point beats in
both score and cost (a Pareto frontier).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from hpcfed.analysis.choices import Combination
from hpcfed.analysis.groups import Group, fewest_ranks
from hpcfed.analysis.outcomes import COSTS, Measure, RunCost, measure
from hpcfed.analysis.statistics import Estimate
from hpcfed.analysis.swept import Swept, problem
from hpcfed.options import RunConfig


@dataclass(frozen=True)
class Contest:
    """Points that differ in the method and its own options alone, best first."""

    condition: Combination
    """What was swept for all methods; the data set and clients where nothing was."""
    judged: Measure
    ranking: list[Group]
    leads: list[Estimate]
    """By how much the first is better than each of the others."""
    own: tuple[str, ...]
    """The options of methods that were swept, which tell entrants apart."""

    @property
    def winner(self) -> Group:
        return self.ranking[0]

    @property
    def rivals(self) -> list[Group]:
        """Points that the seeds do not tell apart from the best."""
        found = []
        for group, lead in zip(self.ranking[1:], self.leads, strict=True):
            # Without an interval nothing is known of the noise.
            if not lead.bounded or lead.low <= 0:
                found.append(group)
        return found

    @property
    def decided(self) -> bool:
        return not self.rivals

    @property
    def seeds(self) -> int:
        """The fewest seeds of a point."""
        return min(len(self.judged.by_seed(group)) for group in self.ranking)


def contests(every: Sequence[Group], options: Sequence[Swept]) -> list[Contest]:
    """Compare the methods under every condition that several of them were run under."""
    shared = set(RunConfig.model_fields) | {"on", "stacked_seeds"}
    names = []
    own = []
    for option in options:
        if option.name in ("method", "ranks"):
            continue
        if option.name in shared:
            names.append(option.name)
        else:
            own.append(option.name)
    conditions: dict[Combination, dict[Combination, Group]] = defaultdict(dict)
    for group in fewest_ranks(every):
        entrant = group.options.only(["method", *own])
        condition = group.options.only(names or ("dataset", "clients"))
        conditions[condition].setdefault(entrant, group)
    made = []
    for condition, entrants in conditions.items():
        members = list(entrants.values())
        judged = measure(members)
        methods = {group.options["method"] for group in members}
        if judged is not None and len(methods) > 1:
            made.append(_contest(condition, judged, members, tuple(own)))
    return made


def _contest(
    condition: Combination,
    judged: Measure,
    members: Sequence[Group],
    own: tuple[str, ...],
) -> Contest:
    known = [group for group in members if isfinite(judged.rank(group))]
    ranking = sorted(known, key=judged.rank)
    leads = [judged.gain(ranking[0], other) for other in ranking[1:]]
    return Contest(condition, judged, ranking, leads, own)


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
