"""Speed-up and parallel efficiency of groups that differ in their number of ranks."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import log, nan
from typing import Literal

import numpy as np

from hpcfed.analysis.choices import Combination
from hpcfed.analysis.groups import Group
from hpcfed.analysis.statistics import CONFIDENCE, Estimate, ratio

Kind = Literal["strong", "weak"]
Families = dict[tuple[Combination, float], list[Group]]
"""Groups by key, and by the clients that stay the same."""


@dataclass(frozen=True)
class Scaling:
    """Groups that differ in ranks alone (strong), or in ranks with as many clients on
    each (weak).
    """

    key: Combination
    kind: Kind
    clients: float
    """What stays the same: clients in all (strong), or per rank (weak)."""
    ranks: list[int]
    seconds: list[Estimate]
    """Per round."""
    speedup: list[Estimate]
    """Over the fewest ranks; in weak scaling, of clients per second."""
    efficiency: list[Estimate]
    """Speed-up by its ideal."""
    ideal: list[float]
    """Times as many ranks as the fewest."""


def scalings(every: Sequence[Group]) -> list[Scaling]:
    """Find all sets of groups on several numbers of ranks, strong scaling first."""
    strong: Families = defaultdict(list)
    weak: Families = defaultdict(list)
    for group in every:
        clients = float(group.clients)
        strong[group.key, clients].append(group)
        weak[group.key, clients / group.ranks].append(group)
    return [*_several_ranks("strong", strong), *_several_ranks("weak", weak)]


def _several_ranks(kind: Kind, families: Families) -> list[Scaling]:
    made = []
    for (key, clients), members in families.items():
        # Groups on one number of ranks differ in nothing that scales.
        if len({group.ranks for group in members}) > 1:
            ordered = sorted(members, key=lambda group: group.ranks)
            made.append(_scaling(key, kind, clients, ordered))
    return made


def _scaling(
    key: Combination, kind: Kind, clients: float, members: Sequence[Group]
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
            # Weak scaling has as many times more clients as ranks to work on.
            work = 1.0 if kind == "strong" else more
            faster = ratio(base.seconds, group.seconds, work)
        # Twice the ranks should do strong scaling's work in half the time, and weak
        # scaling's double work in the same: both are a speed-up of 2.
        ideal.append(more)
        speedup.append(faster)
        efficiency.append(
            Estimate(faster.centre / more, faster.low / more, faster.high / more)
        )
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
    """Return the slope of log y over log x: 1 is proportional, 0 is flat. NaN if there
    are fewer than two different x.
    """
    if len(set(x)) < 2:
        return nan
    # A power law is a straight line on logarithmic scales.
    log_x = [log(value) for value in x]
    log_y = [log(value) for value in y]
    return float(np.polyfit(log_x, log_y, 1)[0])


@dataclass(frozen=True)
class Growth:
    """Groups that differ in their number of clients alone."""

    key: Combination
    ranks: int
    clients: list[int]
    seconds: list[Estimate]
    """Per round."""
    per_client: list[float]
    """Seconds by client that takes part in a round."""
    power: Estimate
    """Time grows as clients to this power: 1 is proportional, 0 is flat."""

    @property
    def longer(self) -> Estimate:
        """How many times as long a round takes with most clients as with fewest."""
        return ratio(self.seconds[-1], self.seconds[0])


def growths(every: Sequence[Group]) -> list[Growth]:
    """Find all sets of groups with several numbers of clients."""
    alike: dict[tuple[Combination, int], list[Group]] = defaultdict(list)
    for group in every:
        alike[group.key, group.ranks].append(group)
    made = []
    for (key, ranks), members in alike.items():
        if len(members) < 2:
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
    """Estimate the power of x that y grows with, by a straight line on logarithmic
    scales; with an interval from three points on.
    """
    from scipy import stats  # late, for the reason given in statistics.py

    centre = slope(x, y)
    if len(x) < 3:
        return Estimate(centre)
    fitted = stats.linregress([log(value) for value in x], [log(value) for value in y])
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(x) - 2)) * float(fitted.stderr)
    return Estimate(centre, centre - half, centre + half)
