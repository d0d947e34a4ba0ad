"""Contests: which method is best under equal conditions, and whether seeds tell."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from hpcfed.analysis.choices import Combination
from hpcfed.analysis.groups import Group, fewest_ranks
from hpcfed.analysis.outcomes import Measure, measure
from hpcfed.analysis.statistics import Estimate
from hpcfed.analysis.swept import Swept
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
