"""Charts of a run's clients: their accuracy, their classes, and the position of their
uploads in the latent space of the server's model.
"""

import numpy as np

from hpcfed.analysis.groups import Group
from hpcfed.analysis.render.charts import (
    Axis,
    ScatterPoint,
    heatmap,
    histogram,
    scatter,
)
from hpcfed.analysis.render.sections.section import Section
from hpcfed.analysis.run_findings.learning import FEWEST, last_of_clients, worst_tenth
from hpcfed.errors import count
from hpcfed.results.run import RunRecord
from hpcfed.results.server import LatentMap
from hpcfed.results.stored import RunDetails

NAME_SIZE = (0.05, 0.06)
"""Width and height of a client's number, as shares of a map."""


def accuracy(group: Group) -> Section:
    """Draw each client's accuracy, over rounds and at the last evaluation."""
    section = Section("clients", "Clients' accuracy")
    run = group.first
    if len(evaluated_rounds(run)) > 1 and len(run.evaluated) >= FEWEST:
        title = "every client's accuracy on its own test data"
        if len(group.seeds) > 1:
            title += f", seed {run.facts['seed']}"
        section.charts.append(
            heatmap(
                title,
                100 * over_rounds(run).T,
                Axis("round", whole=True),
                Axis("client", whole=True),
                Axis("accuracy, %"),
                first=(1, 0),
            )
        )
        section.text += _never_judged(run)
    known = 100 * last_of_clients(group.seeds)
    if len(known) >= FEWEST:
        section.charts.append(
            histogram(
                "clients by their last accuracy",
                known.tolist(),
                Axis("accuracy, %"),
                counted="clients",
                marks={
                    "mean": float(known.mean()),
                    "first quartile": float(np.quantile(known, 0.25)),
                    "mean of the worst tenth": worst_tenth(known),
                },
            )
        )
    return section


def _never_judged(run: RunRecord) -> list[str]:
    """Explain the empty rows of the map."""
    empty = int((~np.isfinite(run.client_accuracy).any(0)).sum())
    if not empty:
        return []
    clients = count(empty, "client")
    has = "has" if empty == 1 else "have"
    return [
        f"Empty rows of the map: {clients} that {has} no test data, or that no round "
        "has judged."
    ]


def evaluated_rounds(run: RunRecord) -> np.ndarray:
    """Return the rounds after which clients were evaluated, counted from 0."""
    return np.flatnonzero(np.isfinite(run.client_accuracy).any(1))


def over_rounds(run: RunRecord) -> np.ndarray:
    """Return clients' accuracy by round. A round that was not evaluated has the values
    of the next evaluated one.
    """
    rounds = evaluated_rounds(run)
    every = np.arange(rounds[-1] + 1)
    # For each round, searchsorted finds the next evaluated one.
    values: np.ndarray = run.client_accuracy[rounds[np.searchsorted(rounds, every)]]
    return values


def classes(details: RunDetails) -> Section:
    """Draw how many samples of each class every client has."""
    section = Section("classes", "Who has which classes")
    counts = details.class_counts
    if counts.size and counts.any():
        section.charts.append(
            heatmap(
                "training samples of every client and class",
                counts,
                Axis("class", whole=True),
                Axis("client", whole=True),
                Axis("samples", zero=True),
            )
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
