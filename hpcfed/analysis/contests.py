"""Who is best: methods under equal conditions, and the Pareto frontier (points that no
other point beats in both score and cost).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from hpcfed.analysis.choices import Combination, differences, grouped
from hpcfed.analysis.groups import Group, fewest_ranks
from hpcfed.analysis.labels import label
from hpcfed.analysis.outcomes import COSTS, Measure, RunCost, measure
from hpcfed.analysis.statistics import Estimate
from hpcfed.analysis.swept import Swept, problem
from hpcfed.options import RunConfig


@dataclass(frozen=True)
class Contest:
    """Points that differ only in the method and its own options, best first."""

    condition: Combination
    """What was swept for all methods; the data set and clients if nothing was."""
    judged: Measure
    ranking: list[Group]
    leads: list[Estimate]
    """By how much the first is better than each of the others."""
    own: tuple[str, ...]
    """The methods' own options that were swept, which distinguish entrants."""

    @property
    def winner(self) -> Group:
        return self.ranking[0]

    def entrant(self, group: Group) -> str:
        """Return the method, with its own swept options."""
        return label(group.options.only(("method", *self.own)))

    @property
    def rivals(self) -> list[Group]:
        """Points that the seeds cannot separate from the best."""
        found = []
        for group, lead in zip(self.ranking[1:], self.leads, strict=True):
            # Without an interval, the noise is unknown.
            if not lead.bounded or lead.low <= 0:
                found.append(group)
        return found

    @property
    def decided(self) -> bool:
        return not self.rivals

    @property
    def besides(self) -> list[str]:
        """Other options in which the first two differ: a method may have been given its
        own learning rate.
        """
        first, second = (group.options for group in self.ranking[:2])
        told = {"method", *self.own, *self.condition}
        return [name for name in differences(first, second) if name not in told]

    @property
    def seeds(self) -> int:
        """The smallest number of seeds of a point."""
        return min(len(self.judged.by_seed(group)) for group in self.ranking)


def contests(every: Sequence[Group], options: Sequence[Swept]) -> list[Contest]:
    """Compare the methods under each condition that several of them were run under."""
    # Options of every run make up the condition; a method's own distinguish entrants.
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
        # On the fewest ranks, which come first: ranks change times, not scores.
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
    """Points of one problem, compared by score and one cost."""

    problem: Combination
    judged: Measure
    cost: RunCost
    points: list[Weighed]
    """All points, cheapest first."""
    best: list[Weighed]
    """Points on the frontier, cheapest first: each is better than all cheaper ones. Those
    with the same cost and score are all there.
    """


def frontiers(every: Sequence[Group], options: Sequence[Swept]) -> list[Frontier]:
    """Find the frontiers of all problems on which several choices of options were
    tried.

    Scores on other data, or on another split between clients, are not comparable.
    """
    found = []
    problems = grouped(every, lambda group: problem(group, options))
    for posed, members in problems.items():
        judged = measure(members)
        # Ranks only change the cost: a frontier needs choices of other options.
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
    """Return the points with known score and cost, cheapest first."""
    points = []
    for group in members:
        point = Weighed(group, judged.estimate(group), cost.of(group))
        # An unknown cost is NaN, which is not above 0 either.
        if isfinite(point.score.centre) and point.cost.centre > 0:
            points.append(point)
    return sorted(points, key=lambda point: point.cost.centre)


def _frontier(points: Sequence[Weighed], judged: Measure) -> list[Weighed]:
    best: list[Weighed] = []
    for point in points:
        # Points come cheapest first, so only the best one so far has to be beaten.
        if not best or judged.better(point.score.centre, best[-1].score.centre):
            # Of those with the same cost, keep the better ones.
            best = [one for one in best if one.cost.centre < point.cost.centre]
            best.append(point)
        elif _equal(point, best[-1]) and not _is_among(best, point.group):
            best.append(point)
    return best


def _equal(one: Weighed, other: Weighed) -> bool:
    """Tell whether two points have the same cost and score."""
    costs, scores = (one.cost, other.cost), (one.score, other.score)
    return all(mine.centre == theirs.centre for mine, theirs in (costs, scores))


def _is_among(points: Sequence[Weighed], group: Group) -> bool:
    """Tell whether one of these points is the same choice, on other ranks."""
    return any(point.group.key == group.key for point in points)
