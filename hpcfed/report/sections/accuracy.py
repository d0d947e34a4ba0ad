"""Accuracy over rounds: curves, best values, and what methods judge at the end."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import isnan, nan

import numpy as np
from markupsafe import Markup

from hpcfed.record.run import RunRecord, mean_accuracy
from hpcfed.report.axes import Axis
from hpcfed.report.bars import stripes
from hpcfed.report.charts import Line, chart
from hpcfed.report.groups import Group
from hpcfed.report.labels import ACCURACIES, label
from hpcfed.report.sections.section import (
    MOST_BARS,
    MOST_LINES,
    WHICH,
    Section,
    Table,
    batches,
    estimates_line,
    interval,
    which,
)
from hpcfed.report.statistics import Estimate, of_seeds

MOST_POINTS = 60
"""Points of a curve; more would only be noise, and are drawn as means."""
Families = dict[tuple[str, int], list[Group]]
"""Groups whose curves stand in one chart, by data set and clients."""


def accuracy(every: Sequence[Group]) -> Section:
    section = Section("accuracy", "Accuracy")
    families = _families(every)
    for (dataset, clients), members in sorted(families.items()):
        for series, whose in ACCURACIES.items():
            title = f"{dataset}, {clients:,} clients: {whose}"
            for drawn in _draw(_curves(members, series)):
                section.charts.append((title, drawn))
    section.text.append(
        "Bands are 95 % confidence over seeds. A curve of more than "
        f"{MOST_POINTS} evaluations shows means of several in a row."
    )
    section.tables += _best_table(every)
    section.tables += _finals_table(every)
    return section


def _families(every: Sequence[Group]) -> Families:
    """Put groups together whose curves stand in one chart: by data set and clients."""
    families: Families = defaultdict(list)
    seen = set()
    # Ranks change nothing but rounding, so the fewest ranks stand for all.
    for group in sorted(every, key=lambda group: group.ranks):
        curve = (group.key, group.clients)
        if curve not in seen:
            seen.add(curve)
            dataset = str(group.options["dataset"])
            families[dataset, group.clients].append(group)
    return families


def _curves(members: Sequence[Group], series: str) -> list[Line]:
    """Return the curves of groups that were evaluated at all."""
    curves = []
    for group in members:
        curve = _curve(group, series)
        if curve.x:
            curves.append(curve)
    return curves


def _curve(group: Group, name: str) -> Line:
    """Return a series over rounds, its mean over seeds; without points if there was no
    evaluation.
    """
    # Seeds may have stopped at the target after different numbers of rounds.
    shortest = min(run.rounds_done for run in group.seeds)
    by_seed = [run.rounds[name][:shortest] for run in group.seeds]
    series = np.array(by_seed)
    unknown = np.isnan(series).any(0)
    evaluated = np.flatnonzero(~unknown)
    # Windows of evaluations, each drawn as one point; of one evaluation if few.
    points = min(len(evaluated), MOST_POINTS)
    windows = np.array_split(evaluated, points) if points else []
    rounds, estimates = [], []
    for window in windows:
        rounds.append(float(window.mean()) + 1)  # people count from 1
        percent = 100 * series[:, window].mean(1)
        estimates.append(of_seeds(percent.tolist(), most=100))
    name = label(group.key.without("dataset"))  # which the chart's title has
    return estimates_line(name, rounds, estimates, band=True)


def _draw(curves: Sequence[Line]) -> Iterator[Markup]:
    """Draw curves over rounds, or lying bars where runs were evaluated once. A single
    value is in the overview already.
    """
    longest = max((len(curve.x) for curve in curves), default=1)
    once = longest == 1
    if once and len(curves) == 1:
        return
    axis = Axis("accuracy, %")
    most = MOST_BARS if once else MOST_LINES
    for some in batches(curves, most):
        if once:
            names = [curve.name for curve in some]
            ends = [curve.y[0] for curve in some]
            yield stripes(names, {"after the last round": ends}, axis)
        else:
            yield chart(some, Axis("rounds", whole=True), axis)


def _best_table(every: Sequence[Group]) -> list[Table]:
    """Return best accuracies of runs that were evaluated more than once, if any."""
    rows = []
    for group in every:
        times = [_evaluations(group.first, name) for name in ACCURACIES]
        if max(times) > 1:
            row = which(group)
            for name in ACCURACIES:
                best = [run.best(name) for run in group.seeds]
                row.append(interval(known_mean(best), 100))
            rows.append(row)
    columns = (*WHICH, "clients' best accuracy, %", "global model's, %")
    return [Table(columns, rows)] if rows else []


def _evaluations(run: RunRecord, name: str) -> int:
    evaluated = np.isfinite(run.rounds[name])
    return int(evaluated.sum())


def _finals_table(every: Sequence[Group]) -> list[Table]:
    """Return what methods had judged at the end, where one did."""
    rows = []
    for group in every:
        for name in group.first.finals:
            judged = interval(_final(group, name), 100)
            rows.append([*which(group), name, judged])
    columns = (*WHICH, "judged at the end", "clients, own test data, %")
    return [Table(columns, rows)] if rows else []


def _final(group: Group, name: str) -> Estimate:
    """Estimate what the method had judged at the end, over the seeds that have it."""
    means = []
    for run in group.seeds:
        if name in run.finals:
            means.append(mean_accuracy(run.finals[name]))
    return known_mean(means)


def last_accuracy(group: Group, name: str) -> Estimate:
    """Estimate the last value of a series, over seeds."""
    return known_mean([run.last(name) for run in group.seeds])


def known_mean(accuracies: Sequence[float]) -> Estimate:
    """Estimate an accuracy from the seeds that have one."""
    known = [value for value in accuracies if not isnan(value)]
    return of_seeds(known, most=1) if known else Estimate(nan)
