"""Points of A and B that match except for what changed as a whole, and how their
figures differ.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import isfinite, isnan, nan
from operator import attrgetter
from statistics import fmean

import numpy as np

from hpcfed.analysis.choices import Combination
from hpcfed.analysis.comparison.difference import (
    Difference,
    Measurement,
    Measurements,
    divide,
    subtract,
)
from hpcfed.analysis.groups import Group, Process
from hpcfed.analysis.labels import both_series
from hpcfed.analysis.statistics import Estimate, middle, ratio
from hpcfed.options.metrics import HEADLINES, METRICS, label_of
from hpcfed.results.pace import SECONDS_PER_ROUND
from hpcfed.results.run import RunRecord
from hpcfed.runtime.timer import PHASES
from hpcfed.words import MIB

ROUNDS = "rounds"
"""What the interval of a ratio of times is based on if a side has one run."""


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
        before = _measured(self.before, attrgetter("round_seconds"))
        after = _measured(self.after, attrgetter("round_seconds"))
        if min(len(before), len(after)) > 1:
            found = divide(before, after)
        else:
            change = ratio(self.after.seconds, self.before.seconds)
            found = Difference(change, ROUNDS)
        return Figure(
            SECONDS_PER_ROUND,
            "ms",
            1e3 * self.before.seconds.centre,
            1e3 * self.after.seconds.centre,
            found,
            neutral=1.0,
            words=("slower", "faster"),
        )

    @cached_property
    def phases(self) -> list[Figure]:
        """Seconds per round of each phase that a side has. For a phase that only few
        rounds have, such as the server's learning, this is the mean over rounds
        instead.
        """
        every = [self._phase(phase) for phase in PHASES]
        return [figure for figure in every if figure is not None]

    def _phase(self, phase: str) -> Figure | None:
        usual = partial(_phase_seconds, phase=phase)
        mean = partial(_phase_mean, phase=phase)
        for name, measured in (("", usual), (", mean of all rounds", mean)):
            figure = self._ratio(f"phase {phase}{name}", "ms", measured, 1e3)
            if figure is not None and max(figure.before, figure.after) > 0:
                return figure
        return None

    @cached_property
    def memory(self) -> Figure | None:
        return self._ratio("peak memory of a rank", "MiB", _peak_memory, 1 / MIB)

    @cached_property
    def sent(self) -> Figure | None:
        return self._ratio(
            "sent per round, up and down", "MiB", _bytes, 1 / MIB, counted=True
        )

    @cached_property
    def energy(self) -> Figure | None:
        return self._ratio("energy per round", "J", _joules, 1.0)

    @cached_property
    def virtual(self) -> Figure | None:
        return self._ratio("virtual time of a round", "s", _virtual, 1.0, counted=True)

    @cached_property
    def epsilon(self) -> Figure | None:
        return self._ratio("privacy spent, ε", "", _epsilon, 1.0, counted=True)

    @cached_property
    def costs(self) -> list[Figure]:
        """All costs of a round that both sides have."""
        found = [self.seconds, self.memory, self.sent, self.energy]
        found += [self.virtual, self.epsilon]
        return [figure for figure in found if figure is not None]

    @cached_property
    def common_round(self) -> int | None:
        """The last round that both sides evaluated, if their runs have different
        numbers of rounds: after more rounds, a model is usually better. None if each
        run is judged at its end; 0 if no round was evaluated on both sides.
        """
        ours, theirs = self.before.seeds, self.after.seeds
        if self.before.options["rounds"] == self.after.options["rounds"]:
            return None
        task = self.before.first.task
        names = [*both_series("accuracy"), *both_series(HEADLINES[task])]
        rounds = set(range(1, max(run.rounds_done for run in (*ours, *theirs)) + 1))
        for run in (*ours, *theirs):
            rounds &= _evaluated(run, names)
        return max(rounds, default=0)

    @cached_property
    def accuracies(self) -> list[Figure]:
        """The last accuracies, in points: of clients, and of the global model."""
        return list(self._metric("accuracy"))

    @cached_property
    def headlines(self) -> list[Figure]:
        """Accuracies, and the main metric of a task if it is another one."""
        headline = HEADLINES[self.before.first.task]
        if headline == "accuracy" or self.before.first.task != self.after.first.task:
            return self.accuracies
        return [*self.accuracies, *self._metric(headline)]

    def _metric(self, name: str) -> Iterator[Figure]:
        metric = METRICS[name]
        scale = 100.0 if metric.in_percent else 1.0
        for series, whose in both_series(name).items():
            before = _judged(self.before, series, scale, self.common_round)
            after = _judged(self.after, series, scale, self.common_round)
            if before and after:
                yield Figure(
                    f"{label_of(name, self.before.first.task)}: {whose}",
                    "%" if metric.in_percent else "",
                    fmean(measurement.value for measurement in before),
                    fmean(measurement.value for measurement in after),
                    subtract(before, after),
                    neutral=0.0,
                    words=("higher", "lower"),
                )

    def _ratio(
        self,
        name: str,
        unit: str,
        measured: Callable[[Process], float],
        scale: float,
        *,
        counted: bool = False,
    ) -> Figure | None:
        """Compare the measurements of all processes; None if a side has none."""
        before = _measured(self.before, measured)
        after = _measured(self.after, measured)
        if not before or not after:
            return None
        return Figure(
            name,
            unit,
            scale * _middle(before),
            scale * _middle(after),
            divide(before, after),
            neutral=1.0,
            words=("slower", "faster") if unit in ("ms", "s") else ("more", "less"),
            counted=counted,
        )


def _measured(group: Group, measured: Callable[[Process], float]) -> list[Measurement]:
    """Return the measurements of all processes that have one."""
    measurements = []
    for process in group.processes:
        value = measured(process)
        if isfinite(value):
            seeds = tuple(int(run.facts["seed"]) for run in process.runs)
            measurements.append(Measurement(seeds, value))
    return measurements


def _phase_seconds(process: Process, phase: str) -> float:
    return process.phase_seconds[phase]


def _phase_mean(process: Process, phase: str) -> float:
    return process.phase_means[phase]


def _peak_memory(process: Process) -> float:
    # Seeds that advanced together share their process.
    return float(process.runs[0].peak_memory.max(initial=0))


def _bytes(process: Process) -> float:
    """Return the mean over rounds of a seed."""
    means = []
    for run in process.runs:
        means.append(float(np.mean(run.rounds["bytes_up"] + run.rounds["bytes_down"])))
    return fmean(means)


def _virtual(process: Process) -> float:
    """Return the mean over rounds of a seed, on the virtual clock."""
    return fmean(run.last("virtual_seconds") / run.rounds_done for run in process.runs)


def _epsilon(process: Process) -> float:
    return fmean(run.last("epsilon") for run in process.runs)


def _joules(process: Process) -> float:
    run = process.runs[0]
    return float("nan") if run.energy is None else run.energy / run.rounds_done


def _evaluated(run: RunRecord, names: Sequence[str]) -> set[int]:
    """Return the rounds after which one of these series has a value."""
    known: set[int] = set()
    for name in names:
        if name in run.rounds:
            known |= set((np.flatnonzero(np.isfinite(run.rounds[name])) + 1).tolist())
    return known


def _judged(
    group: Group, series: str, scale: float, after: int | None
) -> list[Measurement]:
    """Return each seed's value after a round, or its last one."""
    measurements = []
    for run in group.seeds:
        if after is None:
            value = run.last(series)
        else:
            known = run.rounds.get(series)
            value = float(known[after - 1]) if after and known is not None else nan
        if not isnan(value):
            measurements.append(Measurement((int(run.facts["seed"]),), scale * value))
    return measurements


def _middle(measurements: Measurements) -> float:
    return middle([measurement.value for measurement in measurements])


def matched(
    before: Sequence[Group], after: Sequence[Group], changed: set[str]
) -> tuple[list[tuple[Group, Group]], list[Group], list[Group]]:
    """Return pairs of groups that agree in all options except the `changed` ones, then
    the groups that only A has, then the groups that only B has.
    """
    # Lists, because runs of an older version may lack an option of their method.
    partners: dict[Combination, list[Group]] = defaultdict(list)
    for group in after:
        partners[group.options.without(*changed)].append(group)
    pairs, alone = [], []
    for group in before:
        candidates = partners[group.options.without(*changed)]
        if candidates:
            pairs.append((group, candidates.pop(0)))
        else:
            alone.append(group)
    left = [group for candidates in partners.values() for group in candidates]
    return pairs, alone, left
