"""A and B side by side: how figures differ at points of both, and over all."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import inf, isfinite, isnan, nan
from operator import attrgetter
from statistics import fmean

import numpy as np

from hpcfed.analysis.choices import Combination, distinguish, grouped
from hpcfed.analysis.comparison.changes import (
    Change,
    changed_as_a_whole,
    code_changes,
    option_changes,
)
from hpcfed.analysis.groups import Group, Process
from hpcfed.analysis.labels import both_series
from hpcfed.analysis.statistics import (
    ONE_RUN,
    Difference,
    Estimate,
    Measurements,
    divide,
    mean_change,
    middle,
    ratio,
    subtract,
)
from hpcfed.options.metrics import HEADLINES, METRICS, label_of
from hpcfed.results.pace import SECONDS_PER_ROUND
from hpcfed.results.run import RunRecord
from hpcfed.runtime.timer import PHASES
from hpcfed.words import MIB

ROUNDS = "rounds"
"""What the interval of a ratio of times is based on if a side has one run."""


@dataclass(frozen=True)
class RoundCost:
    """A cost of a round, or of a run, as each process has measured it."""

    name: str
    unit: str
    of: Callable[[Process], float]
    scale: float = 1.0
    """Factor from the measured value to its display."""
    counted: bool = False
    """Whether it is counted, not measured; then a single run has no noise."""

    @property
    def words(self) -> tuple[str, str]:
        """What B is called if it has more, and if it has less."""
        return ("slower", "faster") if self.unit in ("ms", "s") else ("more", "less")


def _sent(process: Process) -> float:
    """Return the mean over rounds of a seed."""
    return fmean(float(np.mean(run.sent)) for run in process.runs)


def _joules(process: Process) -> float:
    run = process.timed
    return nan if run.energy is None else run.energy / run.rounds_done


SECONDS = RoundCost(SECONDS_PER_ROUND, "ms", attrgetter("round_seconds"), 1e3)
MEMORY = RoundCost(
    "peak memory of a rank",
    "MiB",
    # Seeds that advanced together share their process.
    lambda process: float(process.timed.peak_memory.max(initial=0)),
    1 / MIB,
)
SENT = RoundCost("sent per round, up and down", "MiB", _sent, 1 / MIB, counted=True)
ENERGY = RoundCost("energy per round", "J", _joules)
VIRTUAL = RoundCost(
    "virtual time of a round",
    "s",
    lambda process: fmean(
        run.last("virtual_seconds") / run.rounds_done for run in process.runs
    ),
    counted=True,
)
EPSILON = RoundCost(
    "privacy spent, ε",
    "",
    lambda process: fmean(run.last("epsilon") for run in process.runs),
    counted=True,
)


@dataclass(frozen=True)
class Figure:
    """A figure of A and of B, and their difference."""

    name: str
    unit: str
    before: float
    after: float
    found: Difference
    neutral: float
    """The change if nothing has changed: 1 for a ratio, 0 for a difference."""
    words: tuple[str, str]
    """What B is called if it has more, and if it has less."""
    counted: bool = False
    """Whether it is counted, not measured; then a single run has no noise."""

    @property
    def change(self) -> Estimate:
        return self.found.change

    @property
    def beyond_interval(self) -> bool:
        """Whether the interval, if any, excludes "no change"."""
        change = self.change
        if not change.bounded:
            return change.centre != self.neutral
        return not change.low <= self.neutral <= change.high

    @property
    def repeated(self) -> bool:
        """Whether several runs separate it from noise, or it has no noise."""
        return self.counted or self.found.over_runs

    @property
    def told_apart(self) -> bool:
        """Whether something has changed, beyond the noise from run to run.

        Rounds of one run cannot tell: on a shared machine, the same run took 1.8 times
        as long a minute later, and its rounds agreed on that.
        """
        return self.repeated and self.beyond_interval

    @property
    def same(self) -> bool:
        """Whether both sides are equal to the last digit."""
        return self.before == self.after and not self.beyond_interval


@dataclass(frozen=True)
class PointPair:
    """Runs of A and B with the same options, except those that changed as a whole."""

    before: Group
    after: Group
    key: Combination
    """The options that distinguish it from other points, beyond clients and ranks."""

    @cached_property
    def seconds(self) -> Figure:
        """Seconds per round, on the slowest rank."""
        figure = self.ratio(SECONDS)
        assert figure is not None  # every run has seconds
        before, after = self.before.seconds, self.after.seconds
        if min(len(self.before.processes), len(self.after.processes)) < 2:
            figure = replace(figure, found=Difference(ratio(after, before), ROUNDS))
        return replace(figure, before=1e3 * before.centre, after=1e3 * after.centre)

    @cached_property
    def phases(self) -> list[Figure]:
        """Seconds per round of each phase that a side has. For a phase that only few
        rounds have, such as the server's learning, this is the mean over rounds
        instead.
        """
        every = [self._phase(phase) for phase in PHASES]
        return [figure for figure in every if figure is not None]

    def _phase(self, phase: str) -> Figure | None:
        def median(process: Process) -> float:
            return process.phase_seconds[phase]

        def mean(process: Process) -> float:
            return process.phase_means[phase]

        for remark, of in (("", median), (", mean of all rounds", mean)):
            figure = self.ratio(RoundCost(f"phase {phase}{remark}", "ms", of, 1e3))
            if figure is not None and max(figure.before, figure.after) > 0:
                return figure
        return None

    @cached_property
    def costs(self) -> list[Figure]:
        """All costs of a round that both sides have, the seconds first."""
        others = map(self.ratio, (MEMORY, SENT, ENERGY, VIRTUAL, EPSILON))
        return [self.seconds, *(figure for figure in others if figure is not None)]

    def ratio(self, cost: RoundCost) -> Figure | None:
        """Compare a cost of all processes; None if a side has not measured it."""
        before, after = _measured(self.before, cost.of), _measured(self.after, cost.of)
        if not before or not after:
            return None
        return Figure(
            cost.name,
            cost.unit,
            cost.scale * middle(list(before.values())),
            cost.scale * middle(list(after.values())),
            divide(before, after),
            neutral=1.0,
            words=cost.words,
            counted=cost.counted,
        )

    @cached_property
    def common_round(self) -> int | None:
        """The last round that both sides evaluated, if their runs have different
        numbers of rounds: after more rounds, a model is usually better. None if each
        run is judged at its end; 0 if no round was evaluated on both sides.
        """
        runs = [*self.before.seeds, *self.after.seeds]
        if self.before.options["rounds"] == self.after.options["rounds"]:
            return None
        task = self.before.first.task
        names = [*both_series("accuracy"), *both_series(HEADLINES[task])]
        evaluated = [_evaluated(run, names) for run in runs]
        return max(set.intersection(*evaluated), default=0)

    @cached_property
    def headlines(self) -> list[Figure]:
        """Accuracies, and the task's main metric if it is another one."""
        names = ["accuracy"]
        if self.before.first.task == self.after.first.task:
            names.append(HEADLINES[self.before.first.task])
        found: list[Figure] = []
        for name in dict.fromkeys(names):
            found += self._metric(name)
        return found

    def _metric(self, name: str) -> Iterator[Figure]:
        metric = METRICS[name]
        for series, whose in both_series(name).items():
            before = _judged(self.before, series, metric.scale, self.common_round)
            after = _judged(self.after, series, metric.scale, self.common_round)
            if before and after:
                yield Figure(
                    f"{label_of(name, self.before.first.task)}: {whose}",
                    "%" if metric.in_percent else "",
                    fmean(before.values()),
                    fmean(after.values()),
                    subtract(before, after),
                    neutral=0.0,
                    words=("higher", "lower"),
                )


def _measured(group: Group, of: Callable[[Process], float]) -> Measurements:
    """Return the measurements of all processes that have one."""
    repeats: Counter[tuple[int, ...]] = Counter()
    found = {}
    for process in group.processes:
        value = of(process)
        if isfinite(value):
            seeds = tuple(int(run.facts["seed"]) for run in process.runs)
            found[seeds, repeats[seeds]] = value
            repeats[seeds] += 1
    return found


def _evaluated(run: RunRecord, names: Sequence[str]) -> set[int]:
    """Return the rounds after which one of these series has a value."""
    known: set[int] = set()
    for name in names:
        if name in run.rounds:
            known |= set((np.flatnonzero(np.isfinite(run.rounds[name])) + 1).tolist())
    return known


def _judged(group: Group, series: str, scale: float, after: int | None) -> Measurements:
    """Return each seed's value after a round, or its last one."""
    found: dict[tuple[tuple[int, ...], int], float] = {}
    for run in group.seeds:
        if after is None:
            value = run.last(series)
        else:
            known = run.rounds.get(series)
            value = float(known[after - 1]) if after and known is not None else nan
        if not isnan(value):
            found[(int(run.facts["seed"]),), 0] = scale * value
    return found


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
        return _overall([point.costs for point in self.points])

    @cached_property
    def phases(self) -> list[Figure]:
        """Seconds of each phase, over all points."""
        return _overall([point.phases for point in self.points])

    @cached_property
    def headlines(self) -> list[Figure]:
        """Accuracies, or the task's main metric, over all points."""
        return _overall([point.headlines for point in self.points])


def compare(
    names: tuple[str, str], before: Sequence[Group], after: Sequence[Group]
) -> Comparison | None:
    """Compare groups of A with groups of B; None if they have no point in common."""
    if not before or not after:
        return None
    changed = changed_as_a_whole(before, after)
    # Lists, because runs of an older version may lack an option of their method.
    partners = grouped(after, lambda group: group.options.without(*changed))
    pairs, alone = [], []
    for group in before:
        candidates = partners.get(group.options.without(*changed))
        if candidates:
            pairs.append((group, candidates.pop(0)))
        else:
            alone.append(group)
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
        only_before=alone,
        only_after=[group for left in partners.values() for group in left],
    )


def _overall(every: Sequence[Sequence[Figure]]) -> list[Figure]:
    """Return each figure over the points that have it, in the order of the first."""
    by_name = grouped(chain.from_iterable(every), lambda figure: figure.name)
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
        return replace(whole, found=mean_change(changes, over_runs=over_runs))
    centres = [change.centre for change in changes]
    if min(centres) <= 0 or max(centres) == inf:  # a side of a point sends nothing
        return replace(whole, found=Difference(Estimate(fmean(centres)), ONE_RUN))
    found = mean_change([change.log() for change in changes], over_runs=over_runs)
    if first.counted and not over_runs:
        # Differences between points are not noise.
        found = Difference(Estimate(found.change.centre), f"{len(figures)} points")
    return replace(whole, found=replace(found, change=found.change.exp()))
