"""The server's model: its losses, what its training took, and a map of its latents."""

import numpy as np

from hpcfed.analysis.curves import windows
from hpcfed.analysis.findings import Table
from hpcfed.analysis.groups import Group
from hpcfed.analysis.render.charts import (
    Axis,
    Drawing,
    Line,
    Point,
    bars,
    lines,
    scatter,
)
from hpcfed.analysis.render.sections.section import MOST_BARS, MOST_LINES, Section
from hpcfed.errors import count
from hpcfed.results.details import RunDetails
from hpcfed.results.server import LatentMap
from hpcfed.words import number

NAME_SIZE = (0.05, 0.06)
"""Shares of a map's width and height that a client's number takes."""
MOST_STEPS = 200
"""Points of a loss; more steps are drawn as means."""


def server(group: Group, details: RunDetails) -> Section:
    """Show losses and times of every training of the server's model."""
    section = Section("server", "The server's model")
    learnings = group.first.learnings
    if not learnings:
        return section
    rounds = [learning.round + 1 for learning in learnings]
    for network, losses in details.losses.items():
        section.charts += _loss(network, losses, rounds)
    if 1 < len(learnings) <= MOST_BARS:
        names = [f"after {number}" for number in rounds]
        segments = {}
        for phase in learnings[0].seconds:
            segments[phase] = [one.seconds.get(phase, 0.0) for one in learnings]
        y = Axis("seconds")
        drawn = bars("seconds of every training", names, segments, y, "round")
        section.charts.append(drawn)
    section.tables.append(_table(group))
    return section


def _loss(network: str, losses: np.ndarray, rounds: list[int]) -> list[Drawing]:
    """Draw the loss over steps, a line for every training: of many, the last ones."""
    drawn = []
    for after, of_steps in list(zip(rounds, losses, strict=False))[-MOST_LINES:]:
        known = np.flatnonzero(np.isfinite(of_steps))
        x, y = [], []
        for window in windows(known, MOST_STEPS):
            x.append(float(window.mean()) + 1)
            y.append(float(of_steps[window].mean()))
        if len(x) > 1:
            drawn.append(Line(f"after round {after}", x, y))
    steps, loss = Axis("steps", whole=True), Axis("loss (log)", log=True)
    title = f"loss of the {network}"
    return [lines(title, drawn, steps, loss)] if drawn else []


def _table(group: Group) -> Table:
    """Return what the phases of all trainings took, as `hpcfed show` tells it."""
    run = group.first
    last = run.learnings[-1]
    whole = float(run.rounds["seconds"].sum()) / run.stacked_seeds
    rows = []
    total = 0.0
    for phase in run.learnings[0].seconds:
        seconds = sum(one.seconds.get(phase, 0.0) for one in run.learnings)
        total += seconds
        cells = [number(seconds), number(100 * seconds / whole)]
        if phase in last.parameters:
            cells.append(f"{last.parameters[phase]:,}")
            cells.append(number(last.samples_per_second[phase]))
            cells.append(number(100 * last.utilisation[phase]))
        else:
            cells += ["", "", ""]
        rows.append([phase, *cells])
    rows.append(
        ["server in all", number(total), number(100 * total / whole), "", "", ""]
    )
    columns = ("phase", "seconds", "of the run, %", "parameters", "samples per second",
               "of the device's peak, %")  # fmt: skip
    trainings = count(len(run.learnings), "training")
    return Table(columns, rows, f"{trainings} on {last.rows} uploads at last")


def latents(details: RunDetails) -> Section:
    """Show where uploads lie in the space in which the server's model generates."""
    section = Section("latents", "Latents of uploads")
    found = details.latents
    if found is None:
        return section
    counts = details.class_counts
    by_class = len(counts) > found.clients.max()
    named = _apart(found)
    points = []
    for place, client in enumerate(found.clients.tolist()):
        x, y = found.places[place].tolist()
        label = str(client) if place in named else ""
        series = f"class {int(counts[client].argmax())}" if by_class else ""
        points.append(Point(x, y, f"client {client}", series, label))
    points.sort(key=lambda point: point.series)
    first, second = (f"{share:.0%} of the variance" for share in found.shares)
    x_axis = Axis(f"first principal axis, {first}")
    y_axis = Axis(f"second principal axis, {second}")
    section.charts.append(scatter("uploads by client", points, x_axis, y_axis))
    section.text.append(
        "Each point is an upload that the server's model learnt from last; numbers name "
        "the clients of some. Points of a client that lie together, apart from others, "
        "show that the model can tell it."
    )
    if by_class:
        section.text.append("Colours are the class that the client has most of.")
    return section


def _apart(found: LatentMap) -> set[int]:
    """Return the newest upload of every client whose name would not lie on another's."""
    newest = {client: place for place, client in enumerate(found.clients.tolist())}
    span = np.maximum(np.ptp(found.places, axis=0), np.finfo(float).tiny)
    scaled = found.places / span
    named: list[int] = []
    for place in newest.values():
        distances = np.abs(scaled[named] - scaled[place])
        if not (distances < NAME_SIZE).all(1).any():
            named.append(place)
    return set(named)
