"""The outcome of a point: how well its clients do, and what a run of it costs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, nan
from statistics import fmean

import numpy as np

from hpcfed.analysis.findings import OF_100, PLAIN, Kind
from hpcfed.analysis.groups import Group
from hpcfed.analysis.labels import both_series
from hpcfed.analysis.statistics import Estimate, difference, of_runs, of_seeds
from hpcfed.options.metrics import HEADLINES, METRICS, Metric, label_of, metric_of
from hpcfed.words import MIB


@dataclass(frozen=True)
class Measure:
    """How points of one task are judged: by the last value of a series."""

    series: str
    name: str
    """Its display name."""
    whose: str
    """Whose model and test data."""
    metric: Metric

    @property
    def axis(self) -> str:
        """Its name with its unit."""
        return self.metric.axis(self.name)

    @property
    def unit(self) -> str:
        return " %" if self.metric.in_percent else ""

    @property
    def steps(self) -> str:
        """The unit of differences."""
        return " points" if self.metric.in_percent else ""

    @property
    def kind(self) -> Kind:
        """The kind of cells with its scaled values."""
        return OF_100 if self.metric.in_percent else PLAIN

    def by_seed(self, group: Group) -> dict[int, float]:
        """Return the scaled value of each seed that has one."""
        found = {}
        for run in group.seeds:
            value = run.last(self.series)
            if isfinite(value):
                found[int(run.facts["seed"])] = self.metric.scale * value
        return found

    def estimate(self, group: Group) -> Estimate:
        """Estimate the scaled value over seeds."""
        return last_metric(group, self.series).scaled(self.metric.scale)

    def gain(self, one: Group, other: Group) -> Estimate:
        """Estimate by how much one point is better than another."""
        found = difference(self.by_seed(one), self.by_seed(other))
        if not self.metric.lower_is_better:
            return found
        # Negated ends swap places.
        return Estimate(-found.centre, -found.high, -found.low)

    def better(self, one: float, other: float) -> bool:
        return one < other if self.metric.lower_is_better else one > other

    def rank(self, group: Group) -> float:
        """Return a number that sorts the best point first, unknown ones last."""
        centre = self.estimate(group).centre
        if not isfinite(centre):
            return inf
        return centre if self.metric.lower_is_better else -centre


def measure(every: Sequence[Group]) -> Measure | None:
    """Return how these points are judged: by their task's metric, on the clients' own
    test data or, if some point has none, for the global model. None if they cannot be
    compared.
    """
    for judged in measures(every):
        if all(_known(group, judged.series) for group in every):
            return judged
    return None


def measures(every: Sequence[Group]) -> list[Measure]:
    """Return the possible measures for points of one task: on the clients' own test
    data, and for the global model. Empty if tasks differ.
    """
    tasks = {group.first.task for group in every}
    if len(tasks) != 1:
        return []
    (task,) = tasks
    metric = METRICS[HEADLINES.get(task, "accuracy")]
    name = label_of(metric.name, task)
    both = both_series(metric.name).items()
    return [Measure(series, name, whose, metric) for series, whose in both]


def _known(group: Group, series: str) -> bool:
    return any(isfinite(run.last(series)) for run in group.seeds)


def last_metric(group: Group, series: str) -> Estimate:
    """Estimate the last value of a series of a metric, over seeds."""
    lasts = [run.last(series) for run in group.seeds]
    return known_metric(metric_of(series), lasts)


def known_metric(name: str, values: Sequence[float]) -> Estimate:
    """Estimate a metric from the seeds that have one and have not diverged."""
    least, most = metric_limits(name)
    return _of_known(values, least, most)


def _of_known(
    values: Sequence[float], least: float = 0.0, most: float = inf
) -> Estimate:
    known = [value for value in values if isfinite(value)]
    return of_seeds(known, least=least, most=most) if known else Estimate(nan)


def metric_limits(name: str) -> tuple[float, float]:
    """Return the range of a metric's values."""
    metric = METRICS[name]
    # Only R² has no lower limit.
    least = -inf if name == "r2" else 0.0
    return least, 1.0 if metric.in_percent else inf


@dataclass(frozen=True)
class RunCost:
    """The cost of a whole run."""

    name: str
    unit: str
    measured: Callable[[Group], Estimate]
    scale: float = 1.0
    """Factor from the measured value to the unit."""

    @property
    def axis(self) -> str:
        return f"{self.name}, {self.unit}"

    def of(self, group: Group) -> Estimate:
        """Estimate the cost of a point in the unit."""
        return self.measured(group).scaled(self.scale)


def run_seconds(group: Group) -> Estimate:
    """Estimate the seconds of all rounds of a run, on the slowest rank; unknown if it
    was resumed beside others than before: such seconds do not add up.
    """
    totals = []
    for process in group.processes:
        if not process.timed.first_alike:
            total = float(np.nansum(process.timed.rounds["seconds"]))
            totals.append(total)
    return of_runs(totals) if totals else Estimate(nan)


def run_bytes(group: Group) -> Estimate:
    """Estimate the bytes exchanged between clients and the server in a run."""
    return of_seeds([float(np.nansum(run.sent)) for run in group.seeds])


def run_energy(group: Group) -> Estimate:
    """Estimate the joules of all GPUs in a run; unknown if no GPU counts them."""
    totals = []
    for process in group.processes:
        energy = process.timed.energy
        # 0 means that no counter moved, not that a run was free.
        if energy is not None and isfinite(energy) and energy > 0:
            totals.append(energy)
    return of_runs(totals) if totals else Estimate(nan)


def run_virtual_seconds(group: Group) -> Estimate:
    """Estimate the virtual time of all rounds of a run; unknown without a clock."""
    return _of_known([run.last("virtual_seconds") for run in group.seeds])


def run_epsilon(group: Group) -> Estimate:
    """Estimate the privacy that a run has spent; unknown if none was requested."""
    return _of_known([run.last("epsilon") for run in group.seeds])


COSTS = {
    "seconds": RunCost("time of a run", "s", run_seconds),
    "bytes": RunCost("bytes of a run", "MiB", run_bytes, 1 / MIB),
    "virtual": RunCost("virtual time of a run", "h", run_virtual_seconds, 1 / 3600),
    "energy": RunCost("energy of a run", "J", run_energy),
}
"""Costs to weigh scores against, by their names in exports."""


def to_target(group: Group, name: str, *, held: bool = False) -> list[float]:
    """Return a cost up to the target, or until it is `held`, of the seeds that came so
    far; for seconds of all their repeats, which measure the time again. Seconds of runs
    that were resumed beside others are unknown.
    """
    timed = name == "seconds"
    values = []
    for run in group.runs if timed else group.seeds:
        reached = run.stays() if held else run.reached()
        if reached is not None:
            unknown = timed and run.first_alike
            values.append(nan if unknown else float(getattr(reached, name)))
    return values


def mean_to_target(group: Group, name: str, *, held: bool = False) -> float:
    """Return the mean of a cost up to the target, or until it is `held`; NaN unless
    every seed came so far, and if it is unknown for one.
    """
    values = to_target(group, name, held=held)
    every = group.runs if name == "seconds" else group.seeds
    return fmean(values) if len(values) == len(every) else nan


def seconds_to_target(group: Group) -> Estimate:
    """Estimate the seconds up to the target over repeats; unknown unless all came so
    far.
    """
    totals = []
    for process in group.processes:
        alone = replace(group, processes=(process,))
        totals.append(mean_to_target(alone, "seconds"))
    return of_runs(totals) if all(map(isfinite, totals)) else Estimate(nan)
