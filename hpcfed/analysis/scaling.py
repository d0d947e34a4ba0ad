"""How the time of a round depends on ranks and clients, and what limits it."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import log, nan
from typing import Literal

import numpy as np

from hpcfed.analysis.choices import Combination, grouped
from hpcfed.analysis.groups import Group
from hpcfed.analysis.statistics import CONFIDENCE, Estimate, ratio
from hpcfed.errors import UserError
from hpcfed.results.profiles import Part, read_profile

ScalingKind = Literal["strong", "weak"]
Families = dict[tuple[Combination, float], list[Group]]
"""Groups by key, and by the number of clients that stays fixed."""


@dataclass(frozen=True)
class Scaling:
    """Groups that differ only in ranks, with equal clients in all or on each rank."""

    key: Combination
    kind: ScalingKind
    clients: float
    """The fixed number of clients: in total (strong), or per rank (weak)."""
    ranks: list[int]
    seconds: list[Estimate]
    """Per round."""
    speedup: list[Estimate]
    """Relative to the fewest ranks; in weak scaling, for clients per second."""
    efficiency: list[Estimate]
    """Speed-up divided by its ideal."""
    ideal: list[float]
    """Ranks as a multiple of the fewest."""


def scalings(every: Sequence[Group]) -> list[Scaling]:
    """Find all sets of groups on several numbers of ranks, strong scaling first."""
    # Floats as keys: equal divisions give equal floats, and only those belong together.
    strong = grouped(every, lambda group: (group.key, float(group.clients)))
    weak = grouped(every, lambda group: (group.key, group.clients / group.ranks))
    return [*_several_ranks("strong", strong), *_several_ranks("weak", weak)]


def _several_ranks(kind: ScalingKind, families: Families) -> list[Scaling]:
    made = []
    for (key, clients), members in families.items():
        # Groups on one number of ranks do not scale.
        if len({group.ranks for group in members}) > 1:
            ordered = sorted(members, key=lambda group: group.ranks)
            made.append(_scaling(key, kind, clients, ordered))
    return made


def _scaling(
    key: Combination, kind: ScalingKind, clients: float, members: Sequence[Group]
) -> Scaling:
    base = members[0]
    ideal = []
    speedup = []
    efficiency = []
    for group in members:
        more = group.ranks / base.ranks
        if group is base:
            faster = Estimate(1.0, 1.0, 1.0)  # by definition, without uncertainty
        else:
            # In weak scaling, the work grows with the ranks.
            work = 1.0 if kind == "strong" else more
            faster = ratio(base.seconds, group.seconds, work)
        # With twice the ranks, strong scaling should do the same work in half the time,
        # and weak scaling double work in the same time: both are a speed-up of 2.
        ideal.append(more)
        speedup.append(faster)
        efficiency.append(faster.scaled(1 / more))
    return Scaling(
        key=key,
        kind=kind,
        clients=clients,
        ranks=[group.ranks for group in members],
        seconds=[group.seconds for group in members],
        speedup=speedup,
        efficiency=efficiency,
        ideal=ideal,
    )


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the slope of log y over log x: 1 is proportional; NaN for one x."""
    if len(set(x)) < 2:
        return nan
    # A power law is a straight line on logarithmic scales.
    log_x = [log(value) for value in x]
    log_y = [log(value) for value in y]
    return float(np.polyfit(log_x, log_y, 1)[0])


@dataclass(frozen=True)
class Growth:
    """Groups that differ only in their number of clients."""

    key: Combination
    ranks: int
    clients: list[int]
    seconds: list[Estimate]
    """Per round."""
    per_client: list[float]
    """Seconds divided by the clients that take part in a round."""
    power: Estimate
    """Time grows as clients to this power: 1 is proportional, 0 is flat."""

    @property
    def longer(self) -> Estimate:
        """The ratio of a round's time with the most clients to that with the fewest."""
        return ratio(self.seconds[-1], self.seconds[0])


def growths(every: Sequence[Group]) -> list[Growth]:
    """Find all sets of groups with several numbers of clients."""
    alike = grouped(every, lambda group: (group.key, group.ranks))
    made = []
    for (key, ranks), members in alike.items():
        # Members with the same clients differ in an option that does not act.
        if len({group.clients for group in members}) < 2:
            continue
        ordered = sorted(members, key=lambda group: group.clients)
        clients = [group.clients for group in ordered]
        seconds = [group.seconds for group in ordered]
        made.append(
            Growth(
                key=key,
                ranks=ranks,
                clients=clients,
                seconds=seconds,
                # Only clients that take part cost time.
                per_client=[group.seconds.centre / group.cohort for group in ordered],
                power=power(clients, [estimate.centre for estimate in seconds]),
            )
        )
    return made


def power(x: Sequence[float], y: Sequence[float]) -> Estimate:
    """Estimate the power of x that y grows with; three points have an interval."""
    from scipy import stats  # late, for the reason given in statistics.py

    centre = slope(x, y)
    if len(x) < 3:
        return Estimate(centre)
    fitted = stats.linregress([log(value) for value in x], [log(value) for value in y])
    # n − 2 degrees of freedom: a line has two parameters.
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(x) - 2)) * float(fitted.stderr)
    return Estimate(centre, centre - half, centre + half)


@dataclass(frozen=True)
class Loss:
    """A phase that more ranks shorten less than they should."""

    phase: str
    ranks: int
    """The fewest ranks with the same number of clients: the baseline."""
    before: float
    """Its seconds on the fewest ranks."""
    after: float
    """Its seconds on the most ranks."""


@dataclass(frozen=True)
class Limit:
    """Where the time of a round goes, at the largest point of a choice of options."""

    group: Group
    phase: str
    """The phase that takes most of a round."""
    share: float
    """Share of the time of all counted rounds: few of them may take most of it."""
    loss: Loss | None
    """None if no smaller number of ranks was measured."""


def limits(every: Sequence[Group]) -> list[Limit]:
    """Find the limit of each choice of options, at its most ranks and clients."""
    choices = grouped(every, lambda group: group.key)
    return [_limit(members) for members in choices.values()]


def _limit(members: Sequence[Group]) -> Limit:
    # Ranks first: limits show where a run is spread the most.
    largest = max(members, key=lambda group: (group.ranks, group.clients))
    phases = largest.phase_means
    phase = max(phases, key=lambda name: phases[name])
    whole = sum(phases.values())
    share = phases[phase] / whole if whole > 0 else 0.0
    alike = [group for group in members if group.clients == largest.clients]
    fewest = min(alike, key=lambda group: group.ranks)
    return Limit(largest, phase, share, _loss(fewest, largest))


def _loss(fewest: Group, largest: Group) -> Loss | None:
    """Find the phase that is furthest above its share of the ideal speed-up."""
    if fewest.ranks == largest.ranks:
        return None
    ideal = largest.ranks / fewest.ranks
    before, after = fewest.phase_seconds, largest.phase_seconds
    lost = {name: after[name] - before[name] / ideal for name in after}
    phase = max(lost, key=lambda name: lost[name])
    if lost[phase] <= 0:
        return None
    return Loss(phase, fewest.ranks, before[phase], after[phase])


def profiled(every: Sequence[Group]) -> list[tuple[Group, Part]]:
    """Return the part of each profiled point that took longest."""
    found = []
    for group in every:
        for run in group.runs:
            with suppress(UserError):  # ignore a damaged profile
                profile = read_profile(run.folder)
                if profile is not None and profile.parts:
                    longest = max(profile.parts, key=lambda part: part.seconds)
                    found.append((group, longest))
                    break
    return found
