"""Accuracy and other metrics over rounds: curves, best values, and methods' final
evaluations.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np

from hpcfed import plugins
from hpcfed.analysis.choices import grouped
from hpcfed.analysis.curves import MOST_POINTS, curve, merged
from hpcfed.analysis.findings import PER_CENT_OF, PLAIN, Row, Table
from hpcfed.analysis.groups import Group, fewest_ranks
from hpcfed.analysis.labels import ACCURACIES, ALL_ACCURACIES, both_series, label
from hpcfed.analysis.outcomes import known_metric, metric_limits
from hpcfed.analysis.render.charts import Axis, Drawing, Line, stripes
from hpcfed.analysis.render.sections.section import (
    MOST_BARS,
    MOST_LINES,
    WHICH,
    Section,
    batches,
    held_text,
    line_charts,
    points_table,
    which,
)
from hpcfed.analysis.swept import Swept, held
from hpcfed.options.metrics import METRICS, label_of, metric_of
from hpcfed.results.run import RunRecord, mean_accuracy

CLASSES_PER_ROW = 10
"""Classes per row of a table, by their last digit."""
MOST_BANDS = 4
"""Up to this number of curves in a chart, their bands are distinguishable."""
MOST_FAMILIES = 4
"""Most combinations of data set and number of clients with their own charts."""
MOST_CURVES = 2 * MOST_LINES
"""Fills two charts for each series."""


def accuracy(
    every: Sequence[Group], options: Sequence[Swept], *, drawn: bool = True
) -> Section:
    """Show accuracies over rounds; without charts unless `drawn`."""
    section = Section("accuracy", "Accuracy over rounds")
    if drawn:
        section.text.append(
            f"Bands are 95 % confidence over seeds, drawn for up to {MOST_BANDS} curves. "
            f"A curve of more than {MOST_POINTS} evaluations shows means of several in a "
            "row."
        )
        if any(len({run.rounds_done for run in one.seeds}) > 1 for one in every):
            section.text.append("A curve ends where the first of its seeds ends.")
        add_charts(section, every, options, _charts)
    section.tables += _best_table(every)
    section.tables += _metric_tables(every)
    section.tables += _class_tables(every)
    section.tables += _finals_table(every)
    return section


def add_charts(
    section: Section,
    every: Sequence[Group],
    options: Sequence[Swept],
    draw: Callable[[str, Sequence[Group]], Iterator[Drawing]],
) -> None:
    """Draw a few charts for each data set, with few enough points to be readable."""
    families = chart_families(every)
    for about, family in islice(families.items(), MOST_FAMILIES):
        shown = held(family, options, keep=("ranks",), most=MOST_CURVES)
        section.text += held_text(shown)
        section.charts += draw(about, shown.groups)
    left_out = list(families)[MOST_FAMILIES:]
    if left_out:
        section.text.append(f"Not drawn: {'; '.join(left_out)}.")


def chart_families(every: Sequence[Group]) -> dict[str, list[Group]]:
    """Group curves by data set, and also by clients if there are too many curves."""
    fewest = fewest_ranks(every)
    datasets = grouped(fewest, lambda group: str(group.options["dataset"]))
    families: dict[str, list[Group]] = defaultdict(list)
    for dataset, members in sorted(datasets.items()):
        name = plugins.label(dataset)
        sizes = {group.clients for group in members}
        together = len(members) <= MOST_LINES and len(sizes) > 1
        for group in sorted(members, key=lambda group: group.clients):
            about = name if together else f"{name}, {group.clients:,} clients"
            families[about].append(group)
    return families


def recorded_metrics(every: Sequence[Group]) -> dict[str, str]:
    """Return the metrics besides accuracy that some run has, and their display
    names.
    """
    found: dict[str, str] = {}
    for group in every:
        for name in group.metrics:
            metric = label_of(name, group.first.task)
            # If tasks differ, their losses are different things with the same name.
            same = found.setdefault(name, metric) == metric
            found[name] = metric if same else METRICS[name].label
    return found


def _charts(about: str, members: Sequence[Group]) -> Iterator[Drawing]:
    """Draw accuracies, then each further metric, for groups that have it."""
    for series, whose in ALL_ACCURACIES.items():
        curves = told_apart(members, partial(curve_of, name=series))
        yield from _draw(f"{about}: {whose}", curves, Axis("accuracy, %"))
    for name, metric in recorded_metrics(members).items():
        axis = Axis(METRICS[name].axis(metric))
        for series, whose in both_series(name).items():
            curves = told_apart(members, partial(curve_of, name=series))
            yield from _draw(f"{about}: {metric}, {whose}", curves, axis)


def _metric_tables(every: Sequence[Group]) -> Iterator[Table]:
    """Return last and best values of each metric besides accuracy."""
    for name, metric in recorded_metrics(every).items():
        in_percent = METRICS[name].in_percent
        kind, unit = (PER_CENT_OF, ", %") if in_percent else (PLAIN, "")
        having = [group for group in every if name in group.metrics]
        columns = {}
        whose = ("clients'", "global model's")
        for owner, series in zip(whose, both_series(name), strict=True):
            for when, value in (("last", RunRecord.last), ("best", RunRecord.best)):
                cells = []
                for group in having:
                    values = [value(run, series) for run in group.seeds]
                    cells.append(kind(known_metric(name, values)))
                columns[f"{owner} {when}{unit}"] = cells
        yield points_table(having, columns, caption=metric)


def _class_tables(every: Sequence[Group]) -> Iterator[Table]:
    """Return the last accuracy of each class, of the global model or else of the
    clients, as a mean over seeds.
    """
    for group in every:
        lasts = [run.last_class_accuracy() for run in group.seeds]
        if not all(lasts):
            continue
        for name, whose in ACCURACIES.items():
            by_seed = np.array([last[name] for last in lasts if name in last])
            if not len(by_seed):
                continue
            cells = [PER_CENT_OF(float(value)) for value in by_seed.mean(0)]
            rows: list[Row] = []
            for first in range(0, len(cells), CLASSES_PER_ROW):
                some = cells[first : first + CLASSES_PER_ROW]
                missing = [""] * (CLASSES_PER_ROW - len(some))
                last = first + len(some) - 1
                rows.append([f"{first} to {last}", *some, *missing])
            columns = ("class", *map(str, range(CLASSES_PER_ROW)))
            caption = f"{label(group.key)}: accuracy by class, %, {whose}"
            yield Table(columns, rows, caption)


def told_apart(
    members: Sequence[Group], curve_of_group: Callable[[Group], Line]
) -> list[Line]:
    """Return the curves that have points. Their names include clients if these differ,
    and bands are dropped if there are too many.
    """
    curves = []
    sizes = {group.clients for group in members}
    for group in members:
        one = curve_of_group(group)
        if len(sizes) > 1:
            one = replace(one, name=f"{one.name}, {group.clients:,} clients")
        if one.x:
            curves.append(one)
    curves = merged(curves)
    if len(curves) <= MOST_BANDS:
        return curves
    return [replace(one, low=(), high=()) for one in curves]


def curve_of(group: Group, name: str) -> Line:
    """Return a series over rounds as the mean over seeds; without points if there was
    no evaluation.
    """
    recorded = [run.rounds[name] for run in group.seeds if name in run.rounds]
    metric = metric_of(name)
    least, most = metric_limits(metric)
    return curve(
        label(group.key.without("dataset")),  # already in the chart's title
        recorded,
        scale=METRICS[metric].scale,
        least=least,
        most=most,
    )


def _draw(title: str, curves: Sequence[Line], axis: Axis) -> Iterator[Drawing]:
    """Draw curves over rounds, or horizontal bars if runs were evaluated once. A single
    value is already in the overview.
    """
    if max((len(curve.x) for curve in curves), default=1) > 1:
        yield from line_charts(title, curves, Axis("rounds", whole=True), axis)
    elif len(curves) > 1:
        for some in batches(curves, MOST_BARS):
            names = [curve.name for curve in some]
            ends = [curve.y[0] for curve in some]
            yield stripes(title, names, {"after the last round": ends}, axis)


def _best_table(every: Sequence[Group]) -> list[Table]:
    """Return best accuracies of runs that were evaluated more than once, if any."""
    telling = []
    for group in every:
        rounds = group.first.rounds
        if any(np.isfinite(rounds[name]).sum() > 1 for name in ACCURACIES):
            telling.append(group)
    columns = {}
    titles = ("clients' best accuracy, %", "global model's, %")
    for title, name in zip(titles, ACCURACIES, strict=True):
        cells = []
        for group in telling:
            best = [run.best(name) for run in group.seeds]
            cells.append(PER_CENT_OF(known_metric("accuracy", best)))
        columns[title] = cells
    return [points_table(telling, columns)] if telling else []


def _finals_table(every: Sequence[Group]) -> list[Table]:
    """Return the final evaluations of methods, over the seeds that have them."""
    rows = []
    for group in every:
        for name in group.first.finals:
            having = [run.finals[name] for run in group.seeds if name in run.finals]
            judged = known_metric("accuracy", list(map(mean_accuracy, having)))
            rows.append([*which(group), name, PER_CENT_OF(judged)])
    columns = (*WHICH, "judged at the end", "clients, own test data, %")
    return [Table(columns, rows)] if rows else []
