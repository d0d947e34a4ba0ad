"""What the server's model costs at each point of a study, whether that fits between
rounds, and how it grows with columns, clients and server ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, isnan, nan
from re import sub
from statistics import fmean
from typing import Any

import numpy as np

from hpcfed.analysis.choices import (
    SIZES,
    Combination,
    defaults_of,
    distinguish,
    grouped,
)
from hpcfed.analysis.costmodel import fit_cost
from hpcfed.analysis.groups import Group, Process, options_of
from hpcfed.analysis.labels import label
from hpcfed.analysis.scaling import power
from hpcfed.analysis.statistics import Estimate
from hpcfed.errors import count
from hpcfed.options import facts
from hpcfed.results.run import RunRecord, mean_accuracy
from hpcfed.results.stored import most_memory
from hpcfed.results.study import StudyRecord, TrialRecord

NOT_CLIENTS = ("server", "evaluate", "record")
"""Phases of a round in which clients neither work nor are waited for."""
BEFORE, AFTER = "upload", "pFedGPA"
"""What is evaluated at the end: the rows that the server has learnt from, and those
that it has generated from them.
"""


@dataclass(frozen=True)
class ServerCost:
    """What one learning of the server takes at a point; unknown figures are NaN."""

    options: Combination
    key: Combination
    """The options that distinguish it, beyond clients and ranks."""
    columns: float
    """Columns that it generates."""
    why: str = ""
    """Why the point has no figures."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By part."""
    between: float = nan
    """Seconds that clients work between two learnings."""
    waited: float = nan
    """Seconds that clients waited for it, if they went on while it learnt; else NaN."""
    memory: tuple[float, ...] = (nan,)
    """Peak bytes of each server rank."""
    bank: tuple[float, ...] = (nan,)
    """Bytes of the bank on each server rank."""
    own: float = nan
    """The share of generated updates that have their own client's direction."""
    own_uploads: float = nan
    """The share of uploads that have their own client's direction."""
    before: float = nan
    """Clients' accuracy with their uploads."""
    after: float = nan
    """Clients' accuracy with generated rows."""

    @property
    def clients(self) -> int:
        return int(self.options["clients"])

    @property
    def server_ranks(self) -> int:
        """The ranks that train the model: its own, or those that host clients."""
        own = int(self.options.get("server_ranks") or 0)
        return own or int(self.options["ranks"])

    @property
    def whole(self) -> float:
        """Seconds of all parts."""
        return sum(self.seconds.values()) if self.seconds else nan

    @property
    def share(self) -> float:
        """The share of the time from one learning to the next that the server works."""
        waited = self.whole if isnan(self.waited) else self.waited
        return self.whole / (self.between + waited)

    @property
    def fits(self) -> bool:
        """Whether the server takes no longer than clients do between two learnings."""
        return self.whole <= self.between

    @property
    def limit(self) -> tuple[str, float]:
        """The part that takes longest, and its share of the server's time."""
        part = max(self.seconds, key=lambda name: self.seconds[name])
        return part, self.seconds[part] / self.whole


def server_costs(
    every: Sequence[Group], studies: Sequence[StudyRecord] = ()
) -> list[ServerCost]:
    """Return the costs of all points with a server's model, by size. Points of the
    studies that have failed say why.
    """
    made = [_measured(group) for group in every if group.first.learnings]
    for study in studies:
        made += _failed(study.trials)
    keys = distinguish([one.options for one in made])
    costs = [replace(one, key=key) for one, key in zip(made, keys, strict=True)]
    return sorted(costs, key=lambda one: (_server_text(one), one.clients, one.columns))


def _measured(group: Group) -> ServerCost:
    # The last learning represents all: the first one also loads libraries.
    last = [run.learnings[-1] for run in group.runs if run.learnings]
    parts: dict[str, None] = {}
    for learning in last:
        parts |= dict.fromkeys(learning.seconds)
    seconds = {}
    for part in parts:
        seconds[part] = fmean(one.seconds.get(part, 0.0) for one in last)
    working = 0.0
    stacked = group.options["stacked_seeds"]
    for phase, mean in group.phase_means.items():
        # Of stacked seeds, it has the wait for the others.
        waits = phase == "other" and stacked > 1
        if phase not in NOT_CLIENTS and not waits:
            working += mean
    every = group.options.get("server_every") or group.options["rounds"]
    return ServerCost(
        options=group.options,
        key=group.key,
        columns=_columns(group.first),
        seconds=seconds,
        # Stacked seeds share the rounds' time, but each had the server for itself.
        between=every * working / stacked,
        waited=fmean(one.waited for one in last),
        memory=tuple(most_memory(group.runs).tolist()),
        bank=tuple(np.max([one.bank_bytes for one in last], axis=0).tolist()),
        own=fmean(one.own for one in last),
        own_uploads=fmean(one.own_uploads for one in last),
        before=_accuracy(group, BEFORE),
        after=_accuracy(group, AFTER),
    )


def _columns(run: RunRecord) -> float:
    return float(run.facts.get("generated_columns", nan))


def _accuracy(group: Group, name: str) -> float:
    found = [run.finals[name] for run in group.seeds if name in run.finals]
    return fmean(map(mean_accuracy, found)) if found else nan


def _failed(trials: Sequence[TrialRecord]) -> Iterator[ServerCost]:
    """Yield failed points whose method has a server's model, once for each point."""
    seen = set()
    for trial in trials:
        point = trial.name.rpartition("/")[0]
        if trial.outcome.status != "failed" or point in seen:
            continue
        seen.add(point)
        # Without the exit code, which says nothing about the server.
        why = sub(r"^exit code -?\d+: ", "", trial.outcome.error)
        columns, options = nan, _asked(trial.options)
        if trial.runs:
            # Its record knows what the run has chosen. As if complete: a point is not
            # distinguished by how far it came.
            run = replace(trial.runs[0], status="complete")
            columns, options = _columns(run), options_of(Process((run,), 0, ""))
        if _server_options(options["method"]):
            yield ServerCost(options, options, columns, why=why)


def _asked(given: Mapping[str, Any]) -> Combination:
    """Return the options of a point that has not even left a record."""
    found = defaults_of(given.get("method", defaults_of("")["method"])) | dict(given)
    return Combination(found)


def _server_options(method: str) -> list[str]:
    """Return the names of the server's options that do not follow from the clients'
    network; none if the method has no server.
    """
    found = []
    for name, stated in facts(method).items():
        if stated.group == "server" and not stated.follows_network:
            found.append(name)
    return found


def of_the_network(method: str) -> list[str]:
    """Return the server's options that follow from the clients' network."""
    return [name for name, stated in facts(method).items() if stated.follows_network]


# How costs grow.


@dataclass(frozen=True)
class ServerGrowth:
    """Points that differ only in the number of columns, clients or server ranks."""

    over: str
    name: str
    """What all its points share."""
    points: list[ServerCost]
    """Those with figures, by size."""
    failed: list[ServerCost]
    sizes: list[float]
    """The number in which the points with figures differ."""

    @property
    def power(self) -> Estimate:
        """The server's time grows as the number to this power."""
        return power(self.sizes, [one.whole for one in self.points])

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds whatever the number, and for each one of it."""
        return self._line([one.whole for one in self.points])

    @property
    def memory(self) -> tuple[float, float]:
        """Bytes of the fullest server rank: whatever the number, and for each."""
        return self._line([max(one.memory) for one in self.points])

    def _line(self, values: Sequence[float]) -> tuple[float, float]:
        if len(set(self.sizes)) < 2 or not all(map(isfinite, values)):
            return nan, nan
        pairs = list(zip(self.sizes, values, strict=True))
        cost = fit_cost(pairs, lambda pair: (1.0, pair[0]), lambda pair: pair[1])
        fixed, each = cost.coefficients
        return fixed, each


def over_columns(costs: Sequence[ServerCost]) -> list[ServerGrowth]:
    """Return the points of each server and number of clients, by their columns."""
    return _growths(
        costs,
        "columns",
        lambda one: one.columns,
        alike=lambda one: one.options.only(SIZES),
        told=lambda one: count(one.clients, "client"),
    )


def over_clients(costs: Sequence[ServerCost]) -> list[ServerGrowth]:
    """Return the points of each server and network, by their clients."""
    return _growths(
        costs,
        "clients",
        lambda one: float(one.clients),
        alike=lambda one: Combination(ranks=one.options["ranks"], at=one.columns),
        told=lambda one: f"{one.columns:,.0f} columns",
    )


def over_server_ranks(costs: Sequence[ServerCost]) -> list[ServerGrowth]:
    """Return the points of each server, network and number of clients, by the ranks
    that the server has for itself.
    """
    having = [one for one in costs if one.options.get("server_ranks")]
    return _growths(
        having,
        "server ranks",
        lambda one: float(one.server_ranks),
        alike=lambda one: Combination(one.options.only(SIZES), at=one.columns),
        told=lambda one: f"{count(one.clients, 'client')}, {one.columns:,.0f} columns",
    )


def _growths(
    costs: Sequence[ServerCost],
    over: str,
    size: Callable[[ServerCost], float],
    *,
    alike: Callable[[ServerCost], Combination],
    told: Callable[[ServerCost], str],
) -> list[ServerGrowth]:
    """Group points with the same server that are alike; a group may have one point."""
    ranks = () if over == "server ranks" else ("server_ranks",)

    def family(one: ServerCost) -> Combination:
        method = one.options["method"]
        # Records of older versions lack options, which had the effect of the default.
        filled = Combination(defaults_of(method) | one.options)
        server = filled.only(("method", "on", *ranks, *_server_options(method)))
        return Combination(server, alike=alike(one))

    known = [one for one in costs if isfinite(size(one))]
    made = []
    for members in grouped(known, family).values():
        ordered = sorted(members, key=size)
        points = [one for one in ordered if not one.why]
        made.append(
            ServerGrowth(
                over=over,
                name=f"{_server_text(ordered[0], ranks)}, {told(ordered[0])}",
                points=points,
                failed=[one for one in ordered if one.why],
                sizes=[size(one) for one in points],
            )
        )
    return made


def _server_text(one: ServerCost, ranks: Sequence[str] = ("server_ranks",)) -> str:
    """Return the label of a point's server: the options that distinguish it."""
    named = (*ranks, *_server_options(one.options["method"]))
    own = one.key.only([name for name in one.key if name in named])
    return label(own) or label(one.key.only(["method"]))


def zero_stages(costs: Sequence[ServerCost]) -> list[tuple[ServerCost, ...]]:
    """Return points on several server ranks that differ only in their ZeRO stage."""
    several = [one for one in costs if one.server_ranks > 1 and not one.why]
    found = grouped(several, lambda one: one.options.without("zero_stage"))
    return [
        tuple(sorted(members, key=lambda one: one.options["zero_stage"]))
        for members in found.values()
        if len(members) > 1
    ]
