"""The clients of a run: how well each does, and which classes each has."""

import numpy as np

from hpcfed.analysis.findings import Table
from hpcfed.analysis.groups import Group
from hpcfed.analysis.render.charts import Axis, heatmap, histogram
from hpcfed.analysis.render.sections.section import Section
from hpcfed.errors import count
from hpcfed.results.details import RunDetails
from hpcfed.results.run import RunRecord
from hpcfed.words import number

FEWEST = 3
"""Clients of which there is a distribution."""


def accuracy(group: Group) -> Section:
    """Show every client's accuracy, over rounds and at the last evaluation."""
    section = Section("clients", "Clients' accuracy")
    run = group.first
    rounds = evaluated_rounds(run)
    if len(rounds) > 1 and len(run.evaluated) >= FEWEST:
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
    known = last_of_clients(group)
    if len(known) < FEWEST:
        return section
    figures = {
        "mean": float(known.mean()),
        "first quartile": float(np.quantile(known, 0.25)),
        "mean of the worst tenth": worst_tenth(known),
    }
    section.charts.append(
        histogram(
            "clients by their last accuracy",
            known.tolist(),
            Axis("accuracy, %"),
            counted="clients",
            marks=figures,
        )
    )
    figures |= {"worst client": float(known.min())}
    figures |= {"standard deviation over clients": float(known.std())}
    rows = [[name, number(value)] for name, value in figures.items()]
    section.tables.append(Table(("clients' last accuracy", "%"), rows))
    return section


def _never_judged(run: RunRecord) -> list[str]:
    """Say what the empty rows of the map are."""
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
    """Return clients' accuracy by round; one that was not evaluated has the figures of
    the next that was.
    """
    rounds = evaluated_rounds(run)
    every = np.arange(rounds[-1] + 1)
    values: np.ndarray = run.client_accuracy[rounds[np.searchsorted(rounds, every)]]
    return values


def last_of_clients(group: Group) -> np.ndarray:
    """Return the last known accuracies of all clients of all seeds, in per cent."""
    lasts = [run.last_client_accuracy for run in group.seeds]
    values = 100 * np.concatenate(lasts)
    return values[np.isfinite(values)]


def worst_tenth(values: np.ndarray) -> float:
    """Return the mean of the lowest tenth, of one client at least."""
    few = max(1, len(values) // 10)
    return float(np.sort(values)[:few].mean())


def classes(details: RunDetails) -> Section:
    """Show who has how many samples of which class."""
    section = Section("classes", "Who has which classes")
    counts = details.class_counts
    if not counts.size or not counts.any():
        return section
    drawn = heatmap(
        "training samples of every client and class",
        counts,
        Axis("class", whole=True),
        Axis("client", whole=True),
        Axis("samples", zero=True),
    )
    section.charts.append(drawn)
    samples = counts.sum(1)
    having = (counts > 0).sum(1)
    # A client's largest class as a share of its samples: 1 where it has a single one.
    largest = counts.max(1)[samples > 0] / samples[samples > 0]
    rows = [
        ["classes of a client", *_three(having)],
        ["samples of a client", *_three(samples)],
        ["share of a client's largest class, %", *_three(100 * largest)],
    ]
    columns = ("", "least", "mean", "most")
    section.tables.append(Table(columns, rows))
    return section


def _three(values: np.ndarray) -> list[str]:
    three = (values.min(), values.mean(), values.max())
    return [number(float(value)) for value in three]
