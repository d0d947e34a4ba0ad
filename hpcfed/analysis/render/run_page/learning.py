"""How a run learnt: accuracy, loss and other metrics over rounds, and what was judged at
its end.
"""

from dataclasses import replace

from hpcfed.analysis.curves import MOST_POINTS, curve
from hpcfed.analysis.findings import Table
from hpcfed.analysis.groups import Group
from hpcfed.analysis.labels import all_series
from hpcfed.analysis.outcomes import known_mean, known_metric
from hpcfed.analysis.render.charts import Axis, Drawing, Line, lines
from hpcfed.analysis.render.sections.accuracy import curve_of
from hpcfed.analysis.render.sections.section import Section
from hpcfed.options.metrics import METRICS, label_of
from hpcfed.words import interval

LOSSES = {"train_loss": "local training", "global_loss": "global model, all test data"}
"""Losses that every run records."""
ROUNDS = Axis("rounds", whole=True)


def learning(group: Group) -> Section:
    section = Section("accuracy", "Accuracy and loss")
    metrics = dict.fromkeys(group.metrics)
    if group.first.task in METRICS["accuracy"].tasks:
        metrics = {"accuracy": None, **metrics}
    for name in metrics:
        section.charts += _metric_chart(group, name)
    section.charts += _loss_chart(group)
    section.tables += _table(group, list(metrics))
    if len(group.seeds) > 1:
        section.text.append("Bands and brackets are 95 % confidence over seeds.")
    if group.first.rounds_done > MOST_POINTS:
        section.text.append(
            f"A curve of more than {MOST_POINTS} evaluations shows means of several."
        )
    return section


def _metric_chart(group: Group, name: str) -> list[Drawing]:
    """Draw all series of a metric, unless each has a single point."""
    label = label_of(name, group.first.task)
    axis = Axis(f"{label}, %" if METRICS[name].in_percent else label)
    curves = []
    for series, whose in all_series(name).items():
        curves.append(replace(curve_of(group, series), name=whose))
    return _drawn(label, curves, axis)


def _loss_chart(group: Group) -> list[Drawing]:
    """Draw the losses of training and of the global model on a log axis."""
    curves = []
    for series, whose in LOSSES.items():
        by_seed = [run.rounds[series] for run in group.seeds]
        curves.append(curve(whose, by_seed))
    return _drawn("loss", curves, Axis(f"{_loss(group)} (log)", log=True))


def _loss(group: Group) -> str:
    return label_of("loss", group.first.task)


def _drawn(title: str, curves: list[Line], axis: Axis) -> list[Drawing]:
    known = [line for line in curves if line.x]
    longest = max((len(line.x) for line in known), default=0)
    return [lines(f"{title} over rounds", known, ROUNDS, axis)] if longest > 1 else []


def _table(group: Group, metrics: list[str]) -> list[Table]:
    """Return last and best values, and what the method had judged at the end."""
    rows = []
    for name in metrics:
        scale = 100 if METRICS[name].in_percent else 1
        label = label_of(name, group.first.task)
        for series, whose in all_series(name).items():
            last = known_metric(name, [run.last(series) for run in group.seeds])
            best = known_metric(name, [run.best(series) for run in group.seeds])
            if last.centre == last.centre:  # not NaN
                unit = ", %" if METRICS[name].in_percent else ""
                cells = [interval(last, scale), interval(best, scale)]
                rows.append([f"{label}{unit}: {whose}", *cells])
    for name in group.first.finals:
        finals = [run.finals[name] for run in group.seeds if name in run.finals]
        means = [float(values[values == values].mean()) for values in finals]
        judged = interval(known_mean(means), 100)
        rows.append([f"accuracy at the end, %: {name}", judged, ""])
    return [Table(("metric", "last", "best"), rows)] if rows else []
