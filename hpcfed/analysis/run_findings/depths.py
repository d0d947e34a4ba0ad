"""What the server generates from several depths of inversion."""

from collections.abc import Iterator

import numpy as np

from hpcfed.analysis.findings import (
    COUNT,
    PERCENT,
    SHARE,
    THOUSANDTHS,
    Kind,
    Row,
    Table,
)
from hpcfed.analysis.run_findings.learning import Runs
from hpcfed.results.run import DepthSweep

FIGURES: dict[str, tuple[str, Kind]] = {
    "accuracy": ("accuracy", PERCENT),
    "own": ("own client's", SHARE),
    "distance": ("from own upload", THOUSANDTHS),
}
"""Figures of a depth: what a table calls them, and how it shows them."""


def sweeps(runs: Runs) -> list[DepthSweep]:
    """Return the sweeps of all seeds over the same depths as the first."""
    found = [run.depths for run in runs if run.depths is not None]
    return [one for one in found if np.array_equal(one.depth, found[0].depth)]


def means(every: list[DepthSweep], figure: str) -> list[float]:
    """Return the mean of a figure over clients and seeds, for each depth."""
    return [float(value) for value in np.mean([s.means()[figure] for s in every], 0)]


def of_depths(runs: Runs) -> Iterator[Table]:
    """Yield what rows from each depth are like, if a run has judged several."""
    every = sweeps(runs)
    if not every:
        return
    columns = [means(every, figure) for figure in FIGURES]
    rows: list[Row] = []
    for number, depth in enumerate(every[0].depth.tolist()):
        cells = [
            kind(values[number])
            for values, (_, kind) in zip(columns, FIGURES.values(), strict=True)
        ]
        signal = SHARE(float(every[0].signal[number]))
        rows.append([str(COUNT(depth)), signal, *cells])
    names = [name for name, _ in FIGURES.values()]
    yield Table(("depth of inversion", "signal left", *names), rows, caption(runs))


def caption(runs: Runs) -> str:
    """Say which depth the run has used, and what a depth means."""
    config = runs[0].config
    steps = config.get("diffusion_steps", "all")
    used = config.get("inversion_depth", "another number")
    return (
        f"depth: steps of {steps} by which uploads are diffused before they are "
        f"generated anew; the run takes {used}, the paper's equations all. Own client's: "
        "updates that have the direction of their client's. Distances are in lengths of "
        "the client's update"
    )
