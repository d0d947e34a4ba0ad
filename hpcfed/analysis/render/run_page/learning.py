"""Charts of how a run learnt: over rounds, over virtual time, the privacy spent; and of
its clients: their accuracy, their classes, and the position of their uploads in the
latent space of the server's model.
"""

from dataclasses import replace
from math import isnan

import numpy as np

from hpcfed.analysis.curves import MOST_POINTS, curve
from hpcfed.analysis.groups import Group
from hpcfed.analysis.labels import all_series
from hpcfed.analysis.outcomes import measures
from hpcfed.analysis.render.charts import (
    Axis,
    Drawing,
    Line,
    ScatterPoint,
    heatmap,
    histogram,
    lines,
    scatter,
)
from hpcfed.analysis.render.sections.accuracy import curve_of
from hpcfed.analysis.render.sections.section import Section
from hpcfed.analysis.render.sections.spending import VIRTUAL_TIME, climb_of
from hpcfed.analysis.run_findings.costs import round_seconds
from hpcfed.analysis.run_findings.depths import means, sweeps
from hpcfed.analysis.run_findings.learning import (
    FEWEST,
    client_figures,
    last_of_clients,
)
from hpcfed.errors import count
from hpcfed.options.metrics import METRICS, chosen, label_of
from hpcfed.results.run import RunRecord
from hpcfed.results.server import LatentMap
from hpcfed.results.stored import RunDetails

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
    task = group.first.task
    for name in chosen(group.metrics, task):
        label = label_of(name, task)
        axis = Axis(METRICS[name].axis(label))
        curves = []
        for series, whose in all_series(name).items():
            curves.append(replace(curve_of(group, series), name=whose))
        section.charts += _drawn(f"{label} over rounds", curves, ROUNDS, axis)
    losses = []
    for series, whose in LOSSES.items():
        losses.append(curve(whose, [run.rounds[series] for run in group.seeds]))
    axis = Axis(f"{label_of('loss', task)} (log)", log=True)
    section.charts += _drawn("loss over rounds", losses, ROUNDS, axis)
    if len(group.seeds) > 1:
        section.text.append("Bands are 95 % confidence over seeds.")
        if len({run.rounds_done for run in group.seeds}) > 1:
            section.text.append("Curves end where the first seed ends.")
    if group.first.rounds_done > MOST_POINTS:
        section.text.append(
            f"A curve of more than {MOST_POINTS} evaluations shows means of several."
        )
    return section


def _drawn(title: str, curves: list[Line], x: Axis, y: Axis) -> list[Drawing]:
    """Draw curves, unless each has a single point."""
    known = [line for line in curves if line.x]
    longest = max((len(line.x) for line in known), default=0)
    return [lines(title, known, x, y)] if longest > 1 else []


def virtual_time(group: Group) -> Section:
    """Draw accuracy on the virtual clock, the duration of rounds, and who arrived."""
    section = Section("virtual-time", "Virtual time")
    if not group.first.has_clock:
        return section
    unit, size = VIRTUAL_TIME.unit(group.first.last("virtual_seconds"))
    judged = measures([group])
    curves = []
    for one in judged:
        climb = climb_of(group, one, VIRTUAL_TIME, size=size)
        curves.append(replace(climb, name=one.whose))
    if judged:
        title = f"{judged[0].name} over virtual time"
        x = Axis(f"virtual time, {unit}")
        section.charts += _drawn(title, curves, x, Axis(judged[0].axis))
    durations = [round_seconds(run) for run in group.seeds]
    unit, size = VIRTUAL_TIME.unit(float(np.nanmax(durations[0])))
    axis = f"virtual time of a round, {unit}"
    section.charts += _over_rounds(axis, durations, scale=1 / size)
    shares = []
    for run in group.seeds:
        # The share of each round's participants whose uploads counted.
        cohort = run.rounds["cohort"]
        unknown = np.full(len(cohort), np.nan)
        arrived = run.rounds["arrived"]
        shares.append(np.divide(arrived, cohort, out=unknown, where=cohort > 0))
    section.charts += _over_rounds("uploads that arrived, %", shares, scale=100)
    stale = [run.rounds["staleness"] for run in group.seeds]
    section.charts += _over_rounds("versions that uploads were behind", stale)
    return section


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


# Clients.

NAME_SIZE = (0.05, 0.06)
"""Width and height of a client's number, as shares of a map."""


def clients(group: Group) -> Section:
    """Draw each client's accuracy, over rounds and at the last evaluation."""
    section = Section("clients", "Clients' accuracy")
    run = group.first
    evaluated = np.isfinite(run.client_accuracy)
    if evaluated.any(1).sum() > 1 and len(run.evaluated) >= FEWEST:
        title = "every client's accuracy on its own test data"
        if len(group.seeds) > 1:
            title += f", seed {run.facts['seed']}"
        values = 100 * over_rounds(run).T
        x, y = Axis("round", whole=True), Axis("client", whole=True)
        drawn = heatmap(title, values, x, y, Axis("accuracy, %"), first=(1, 0))
        section.charts.append(drawn)
        empty = int((~evaluated.any(0)).sum())
        if empty:
            has = "has" if empty == 1 else "have"
            section.text.append(
                f"Empty rows of the map: {count(empty, 'client')} that {has} no test "
                "data, or that no round has judged."
            )
    known = 100 * last_of_clients(group.seeds)
    if len(known) >= FEWEST:
        # The chart has dashes for three marks.
        figures = list(client_figures(known).items())[:3]
        drawn = histogram(
            "clients by their last accuracy",
            known.tolist(),
            Axis("accuracy, %"),
            counted="clients",
            marks=dict(figures),
        )
        section.charts.append(drawn)
    return section


def over_rounds(run: RunRecord) -> np.ndarray:
    """Return clients' accuracy by round. A round that was not evaluated has the values
    of the next evaluated one.
    """
    rounds = np.flatnonzero(np.isfinite(run.client_accuracy).any(1))
    every = np.arange(rounds[-1] + 1)
    # For each round, searchsorted finds the next evaluated one.
    values: np.ndarray = run.client_accuracy[rounds[np.searchsorted(rounds, every)]]
    return values


def classes(details: RunDetails) -> Section:
    """Draw how many samples of each class every client has."""
    section = Section("classes", "Who has which classes")
    counts = details.class_counts
    if counts.size and counts.any():
        title = "training samples of every client and class"
        x, y = Axis("class", whole=True), Axis("client", whole=True)
        section.charts.append(heatmap(title, counts, x, y, Axis("samples", zero=True)))
    return section


def depths(group: Group) -> Section:
    """Draw what rows are like that the server generates from several depths."""
    section = Section("depths", "Depth of inversion")
    every = sweeps(group.seeds)
    if not every or len(every[0].depth) < 2:
        return section
    across = every[0].depth.tolist()
    signals = [f"{signal:.0%}" for signal in every[0].signal]
    label = "steps of diffusion (log), and the signal left"
    x = Axis(label, log=True, ticks=across, below=signals)
    shares = []
    for figure, name in (
        ("accuracy", "accuracy"),
        ("own", "rows in their own client's direction"),
    ):
        values = [100 * value for value in means(every, figure)]
        shares.append(Line(name, across, values))
    title = "accuracy and identity of generated rows over depth"
    section.charts.append(lines(title, shares, x, Axis("%", zero=True)))
    drawn = Line("", across, means(every, "distance"))
    y = Axis("distance, in lengths of the update", zero=True)
    title = "distance of generated rows to their uploads over depth"
    section.charts.append(lines(title, [drawn], x, y))
    section.text.append(
        "The server diffuses a client's upload by some steps, and generates a row from "
        "there. The fewer steps, the more of the upload is left (below the axis: √ᾱ, "
        "the share of signal), and the nearer the row is to the upload. "
        "After all steps, to which the paper's equations go, nothing of the client is "
        "left. By default 100 of 1000 steps are taken, which leave 95 %."
    )
    return section


def latents(details: RunDetails) -> Section:
    """Draw the positions of uploads in the latent space of the server's model."""
    section = Section("latents", "Latents of uploads")
    found = details.latents
    if found is None:
        return section
    counts = details.class_counts
    by_class = len(counts) > found.clients.max()
    named = apart(found)
    points = []
    for place, client in enumerate(found.clients.tolist()):
        x, y = found.places[place].tolist()
        label = str(client) if place in named else ""
        series = f"class {int(counts[client].argmax())}" if by_class else ""
        points.append(ScatterPoint(x, y, f"client {client}", series, label))
    points.sort(key=lambda point: point.series)
    first, second = (f"{share:.0%} of the variance" for share in found.shares)
    x_axis = Axis(f"first principal axis, {first}")
    y_axis = Axis(f"second principal axis, {second}")
    section.charts.append(scatter("uploads by client", points, x_axis, y_axis))
    section.text.append(
        "Each point is an upload of those that the server's model was last trained on; "
        "numbers name the clients of some. Where the points of a client lie together, "
        "apart from others, the model can tell this client from the others."
    )
    if by_class:
        section.text.append("Colours are the class that the client has most of.")
    return section


def apart(found: LatentMap) -> set[int]:
    """Return the newest upload of each client whose label would not overlap another."""
    # Later uploads of a client overwrite earlier ones.
    newest = {client: place for place, client in enumerate(found.clients.tolist())}
    span = np.maximum(np.ptp(found.places, axis=0), np.finfo(float).tiny)
    scaled = found.places / span
    named: list[int] = []
    for place in newest.values():
        distances = np.abs(scaled[named] - scaled[place])
        if not (distances < NAME_SIZE).all(1).any():
            named.append(place)
    return set(named)
