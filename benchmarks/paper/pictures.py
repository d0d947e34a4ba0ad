"""What pictures of a paper's figures are made of."""

import math
from collections.abc import Sequence
from statistics import mean, stdev
from typing import NamedTuple

import numpy as np

from benchmarks.paper.cells import Cell
from hpcfed.analysis.render import charts
from hpcfed.analysis.render.charts import Line
from hpcfed.results.run import RunRecord


class Runs(NamedTuple):
    """A cell, and the records of its seeds."""

    cell: Cell
    records: list[RunRecord]

    @property
    def method(self) -> str:
        return self.cell.names[2]


class Picture(NamedTuple):
    """A drawing, and what it is of."""

    drawing: charts.Drawing
    subject: str
    """What the title says that it shows."""


def line_of(name: str, x: Sequence[float] | np.ndarray, values: np.ndarray) -> Line:
    """Return the mean over seeds, [seeds, points], with its standard error; points that
    no seed knows are left out.
    """
    known = ~np.isnan(values).all(0)
    at, middle, low, high = [], [], [], []
    for point in np.flatnonzero(known).tolist():
        column = values[:, point]
        found = estimate(column[~np.isnan(column)].tolist())
        at.append(float(x[point]))
        middle.append(found[0])
        low.append(found[0] - found[1])
        high.append(found[0] + found[1])
    return Line(
        name, at, middle, low, high, interval="standard error", band=len(at) > 12
    )


def estimate(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error; NaN where there is one value."""
    if len(values) < 2:
        return values[0], math.nan
    return mean(values), stdev(values) / math.sqrt(len(values))
