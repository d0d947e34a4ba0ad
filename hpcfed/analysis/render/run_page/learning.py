"""Charts of how a run learnt: over rounds, over virtual time, and the privacy spent."""

from dataclasses import replace
from math import isnan

import numpy as np

from hpcfed.analysis.curves import MOST_POINTS, curve
from hpcfed.analysis.groups import Group
from hpcfed.analysis.labels import all_series
from hpcfed.analysis.outcomes import measures
from hpcfed.analysis.render.charts import Axis, Drawing, Line, lines
from hpcfed.analysis.render.sections.accuracy import curve_of
from hpcfed.analysis.render.sections.section import Section
from hpcfed.analysis.render.sections.spending import VIRTUAL_TIME, climb_of
from hpcfed.analysis.run_findings.costs import round_seconds
from hpcfed.options.metrics import METRICS, label_of
from hpcfed.results.run import RunRecord

LOSSES = {"train_loss": "local training", "global_loss": "global model, all test data"}
"""Losses that every run records."""
ROUNDS = Axis("rounds", whole=True)
COVERED = (
    "ε covers the rows that the server computes from uploads in every round, and "
    "everything computed from them; with local noise, the uploads themselves. It "
    "does not cover what is measured directly on clients: accuracy and loss, who "
    "took part, arrived or was excluded, norms, bytes and virtual time. Nor does it "
    "cover that a run ended because of these. Every run and every seed on the same "
    "data spends its own ε."
)
"""What ε on a run's page covers."""
COVERED_BY_DP_SGD = (
    "ε is that of one sample of one client, against anyone who sees what this client "
    "sends. It covers what clients learn by local training, but not accuracy and "
    "loss, which are measured directly on their data. Every run and every seed on "
    "the same data spends its own ε."
)


def learning(group: Group) -> Section:
    """Draw all metrics and the losses over rounds."""
    section = Section("accuracy", "Accuracy and loss")
    metrics = dict.fromkeys(group.metrics)
    if group.first.task in METRICS["accuracy"].tasks:
        metrics = {"accuracy": None, **metrics}
    for name in metrics:
        section.charts += _metric_chart(group, name)
    section.charts += _loss_chart(group)
    if len(group.seeds) > 1:
        section.text.append("Bands are 95 % confidence over seeds.")
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
    label = label_of("loss", group.first.task)
    return _drawn("loss", curves, Axis(f"{label} (log)", log=True))


def _drawn(title: str, curves: list[Line], axis: Axis) -> list[Drawing]:
    known = [line for line in curves if line.x]
    longest = max((len(line.x) for line in known), default=0)
    return [lines(f"{title} over rounds", known, ROUNDS, axis)] if longest > 1 else []


def virtual_time(group: Group) -> Section:
    """Draw accuracy on the virtual clock, the duration of rounds, and who arrived."""
    section = Section("virtual-time", "Virtual time")
    if not group.first.has_clock:
        return section
    section.charts += _over_virtual_time(group)
    durations = [round_seconds(run) for run in group.seeds]
    unit, size = VIRTUAL_TIME.unit(float(np.nanmax(durations[0])))
    axis = f"virtual time of a round, {unit}"
    section.charts += _over_rounds(axis, durations, scale=1 / size)
    shares = [_arrived(run) for run in group.seeds]
    section.charts += _over_rounds("uploads that arrived, %", shares, scale=100)
    stale = [run.rounds["staleness"] for run in group.seeds]
    section.charts += _over_rounds("versions that uploads were behind", stale)
    return section


def _over_virtual_time(group: Group) -> list[Drawing]:
    """Draw the run's main metric over virtual time, unless it is a single point."""
    unit, size = VIRTUAL_TIME.unit(group.first.last("virtual_seconds"))
    judged = measures([group])
    curves = []
    for one in judged:
        climb = climb_of(group, one, VIRTUAL_TIME, size=size)
        if len(climb.x) > 1:
            curves.append(replace(climb, name=one.whose))
    if not curves:
        return []
    x = Axis(f"virtual time, {unit}")
    title = f"{judged[0].name} over virtual time"
    return [lines(title, curves, x, Axis(judged[0].axis))]


def _arrived(run: RunRecord) -> np.ndarray:
    """Return the share of each round's participants whose uploads counted."""
    cohort = run.rounds["cohort"]
    unknown = np.full(len(cohort), np.nan)
    return np.divide(run.rounds["arrived"], cohort, out=unknown, where=cohort > 0)


def _over_rounds(
    axis: str, by_seed: list[np.ndarray], *, scale: float = 1.0
) -> list[Drawing]:
    """Draw a series over rounds, unless it is constant."""
    drawn = curve("", by_seed, scale=scale)
    # Differences of sums, such as virtual seconds, differ in their last digits.
    if len({f"{value:.5g}" for value in drawn.y}) < 2:
        return []
    title = axis.partition(",")[0]
    return [lines(title, [drawn], ROUNDS, Axis(axis, zero=True))]


def privacy(group: Group) -> Section:
    """Draw the privacy spent by round, and the norm that updates are clipped to."""
    section = Section("privacy", "Privacy")
    spent = [run.rounds["epsilon"] for run in group.seeds]
    section.charts += _over_rounds("ε spent", spent)
    norms = [run.rounds["clip_norm"] for run in group.seeds]
    section.charts += _over_rounds("norm that updates are clipped to", norms)
    private = not isnan(group.first.last("epsilon"))
    if private and group.options.get("sample_noise") is not None:
        section.text.append(COVERED_BY_DP_SGD)
    elif private:
        section.text.append(COVERED)
    elif not isnan(group.first.last("clip_norm")):
        section.text.append("Updates were clipped, and no noise was added: no ε holds.")
    return section
