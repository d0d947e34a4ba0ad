"""Accuracy over rounds, time to a target accuracy, and accuracy under attack."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import isnan, nan
from statistics import fmean

import numpy as np
from markupsafe import Markup

from hpcfed.record.reading import RunRecord, mean_accuracy
from hpcfed.report.axes import Axis
from hpcfed.report.charts import Line, chart, stripes
from hpcfed.report.groups import Group
from hpcfed.report.labels import ACCURACIES, label
from hpcfed.report.sections.section import (
    MIB,
    MOST_BARS,
    MOST_LINES,
    WHICH,
    Section,
    Table,
    batches,
    interval,
    number,
    which,
)
from hpcfed.report.statistics import Estimate, of_seeds

MOST_POINTS = 60
"""Of a curve; more would only be noise, and are drawn as means."""


def accuracy(every: Sequence[Group]) -> Section:
    section = Section("accuracy", "Accuracy")
    for (dataset, clients), members in sorted(_families(every).items()):
        for series, whose in ACCURACIES.items():
            curves = [_curve(group, series) for group in members]
            known = [curve for curve in curves if curve.x]
            for drawn in _draw(known):
                title = f"{dataset}, {clients:,} clients: {whose}"
                section.charts.append((title, drawn))
    section.text.append(
        f"Bands are 95 % confidence over seeds. Of more than {MOST_POINTS} evaluations "
        "a curve shows means of several "
        "in a row."
    )
    section.tables += _best_table(every)
    section.tables += _finals_table(every)
    return section


def _families(every: Sequence[Group]) -> dict[tuple[str, int], list[Group]]:
    """Put groups together whose curves stand in one chart: by data set and clients.

    Ranks change nothing but rounding, so the fewest ranks stand for all.
    """
    families: dict[tuple[str, int], list[Group]] = defaultdict(list)
    seen = set()
    for group in sorted(every, key=lambda group: group.ranks):
        if (group.key, group.clients) not in seen:
            seen.add((group.key, group.clients))
            families[str(group.options["dataset"]), group.clients].append(group)
    return families


def _draw(curves: Sequence[Line]) -> Iterator[Markup]:
    """Draw curves over rounds, or lying bars where runs were evaluated once. A single
    value is in the overview already.
    """
    once = all(len(curve.x) == 1 for curve in curves)
    if once and len(curves) == 1:
        return
    axis = Axis("accuracy, %")
    for some in batches(curves, MOST_BARS if once else MOST_LINES):
        if once:
            names = [curve.name for curve in some]
            ends = {"after the last round": [curve.y[0] for curve in some]}
            yield stripes(names, ends, axis)
        else:
            yield chart(some, Axis("rounds", whole=True), axis)


def _curve(group: Group, name: str) -> Line:
    """Return a series over rounds, its mean over seeds; without points if there was no
    evaluation.
    """
    shortest = min(run.rounds_done for run in group.seeds)
    series = np.array([run.rounds[name][:shortest] for run in group.seeds])
    evaluated = np.flatnonzero(~np.isnan(series).any(0))
    points = min(len(evaluated), MOST_POINTS)
    windows = np.array_split(evaluated, points) if points else []
    estimates = []
    for window in windows:
        by_seed = 100 * series[:, window].mean(1)
        estimates.append(of_seeds(by_seed.tolist(), most=100))
    return Line(
        label(group.key.without("dataset")),  # which the chart's title names
        x=[float(window.mean()) + 1 for window in windows],
        y=[estimate.centre for estimate in estimates],
        low=[estimate.low for estimate in estimates],
        high=[estimate.high for estimate in estimates],
        band=True,
    )


def _best_table(every: Sequence[Group]) -> Iterator[Table]:
    """Return best accuracies of runs that were evaluated more than once."""
    rows = []
    for group in every:
        if any(_evaluations(group.first, name) > 1 for name in ACCURACIES):
            best = [best_accuracy(group, name) for name in ACCURACIES]
            rows.append([*which(group), *(interval(one, 100) for one in best)])
    if rows:
        columns = (*WHICH, "clients' best accuracy, %", "global model's, %")
        yield Table(columns, rows)


def _finals_table(every: Sequence[Group]) -> Iterator[Table]:
    """Return what methods had judged at the end, where one did."""
    rows = []
    for group in every:
        for name in group.first.finals:
            rows.append([*which(group), name, interval(_final(group, name), 100)])
    if rows:
        columns = (*WHICH, "judged at the end", "clients, own test data, %")
        yield Table(columns, rows)


def _evaluations(run: RunRecord, name: str) -> int:
    return int(np.isfinite(run.rounds[name]).sum())


def _final(group: Group, name: str) -> Estimate:
    """Estimate what the method had judged at the end, over the seeds that have it."""
    found = [run.finals[name] for run in group.seeds if name in run.finals]
    return _known([mean_accuracy(accuracies) for accuracies in found])


def best_accuracy(group: Group, name: str) -> Estimate:
    """Estimate the largest value of a series, over seeds."""
    return _known([run.best(name) for run in group.seeds])


def last_accuracy(group: Group, name: str) -> Estimate:
    """Estimate the last value of a series, over seeds."""
    return _known([run.last(name) for run in group.seeds])


def _known(accuracies: Sequence[float]) -> Estimate:
    known = [value for value in accuracies if not isnan(value)]
    return of_seeds(known, most=1) if known else Estimate(nan)


def target(every: Sequence[Group]) -> Section:
    section = Section("target", "Time to target")
    rows = [_target_row(group) for group in every if group.first.target is not None]
    if not rows:
        section.text.append("No run had a target: --target-accuracy gives it one.")
        return section
    columns = (*WHICH, "target, %", "seeds that reached it", "rounds", "seconds",
               "MiB sent")  # fmt: skip
    section.tables.append(Table(columns, rows))
    section.text.append("Means over the seeds that reached the target accuracy.")
    return section


def _target_row(group: Group) -> list[str]:
    every = [run.reached() for run in group.seeds]
    reached = [one for one in every if one is not None]
    rounds = "–"
    seconds = nan
    sent = nan
    if reached:
        rounds = interval(of_seeds([float(one.rounds) for one in reached]))
        seconds = fmean(one.seconds for one in reached)
        sent = fmean(one.bytes for one in reached)
    share = f"{len(reached)} of {len(group.seeds)}"
    return [
        *which(group), f"{group.first.target:g}", share,
        rounds, number(seconds), number(sent / MIB),
    ]  # fmt: skip


def attacks(every: Sequence[Group]) -> Section:
    section = Section("attacks", "Attacks and defences")
    if not any(_attacked(group) or _defended(group) for group in every):
        section.text.append(
            "No run had attackers or a robust rule: --attack and --aggregation ask for them."
        )
        return section
    columns = ("method", "attack", "attackers", "aggregation", "clients", "ranks",
               "last accuracy, %", "best, %")  # fmt: skip
    rows = [_attack_row(group) for group in every]
    section.tables.append(Table(columns, rows, "runs without attackers stand beside"))
    return section


def _attacked(group: Group) -> bool:
    return str(group.options.get("attack", "none")) != "none"


def _defended(group: Group) -> bool:
    return str(group.options["aggregation"]) != "mean"


def _attack_row(group: Group) -> list[str]:
    options = group.options
    last = [_last_common(run) for run in group.seeds]
    best = [float(np.nanmax(_common_series(run))) for run in group.seeds]
    return [
        str(options["method"]),
        str(options["attack"]),
        str(options["attackers"]) if _attacked(group) else "–",
        str(options["aggregation"]),
        f"{group.clients:,}",
        str(group.ranks),
        interval(of_seeds(last, most=1), 100),
        interval(of_seeds(best, most=1), 100),
    ]


def _last_common(run: RunRecord) -> float:
    """Return the global model's last accuracy, or the clients' where there is none."""
    common = run.last("global_accuracy")
    return run.last("accuracy") if isnan(common) else common


def _common_series(run: RunRecord) -> np.ndarray:
    """Return the global model's accuracies, or the clients' where there are none."""
    common = run.rounds["global_accuracy"]
    series: np.ndarray = run.rounds["accuracy"] if np.isnan(common).all() else common
    return series
