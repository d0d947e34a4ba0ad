"""Seconds per round as a sum of few terms, fitted to what was measured, to tell what
more ranks would give.

Coefficients are not negative: each term is a cost. Errors count relative to the time,
so that short rounds matter as much as long ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log2, nan
from statistics import fmean

import numpy as np
from scipy.optimize import nnls


@dataclass(frozen=True)
class Measured:
    clients: float
    """That take part in a round."""
    ranks: int
    columns: float
    seconds: float
    steps: float = 1.0
    """Of the client that makes most of them in a round; others end earlier."""


Terms = dict[str, tuple[str, Callable[[Measured], float]]]
TERMS: Terms = {
    "every round": ("s", lambda m: 1.0),
    "per local step": ("s", lambda m: m.steps),
    "per step of a client of a rank": ("s", lambda m: m.steps * m.clients / m.ranks),
    "per step of a client of a rank, and million columns": (
        "s",
        lambda m: m.steps * m.clients / m.ranks * m.columns / 1e6,
    ),
    "per doubling of the ranks": ("s", lambda m: log2(m.ranks)),
    "per million columns that ranks exchange": (
        "s",
        lambda m: m.columns / 1e6 * 2 * (m.ranks - 1) / m.ranks,
    ),
}
"""By name: the coefficient's unit, and what it is multiplied with."""


@dataclass(frozen=True)
class CostModel:
    coefficients: dict[str, float]
    error: float
    """Mean relative error over the points that it was fitted to."""
    left_out_error: float
    """The same, each point predicted by a fit of the others; NaN where there are too
    few.
    """

    def __call__(self, point: Measured) -> float:
        return sum(c * TERMS[name][1](point) for name, c in self.coefficients.items())


@dataclass(frozen=True)
class HeldOut:
    """The largest point, predicted by a fit that has not seen it."""

    point: Measured
    predicted: float

    @property
    def error(self) -> float:
        """Relative to what was measured."""
        return self.predicted / self.point.seconds - 1


def fit(points: Sequence[Measured]) -> CostModel | None:
    """None where the points cannot tell even two terms apart."""
    chosen = _terms(points)
    if len(chosen) < 2:
        return None
    costs = _relative_costs(points, chosen)
    coefficients = _solve(costs)
    errors = np.abs(costs @ coefficients - 1)
    alone = []
    if len(points) > len(chosen):
        for number, own in enumerate(costs):
            others = np.delete(costs, number, axis=0)
            alone.append(abs(float(own @ _solve(others)) - 1))
    by_name = dict(zip(chosen, coefficients.tolist(), strict=True))
    return CostModel(by_name, float(errors.mean()), fmean(alone) if alone else nan)


def hold_out(points: Sequence[Measured]) -> HeldOut | None:
    """The point with most ranks, then most clients; None where the others do not make a
    fit.
    """
    largest = max(points, key=lambda m: (m.ranks, m.clients, m.columns))
    model = fit([point for point in points if point is not largest])
    return None if model is None else HeldOut(largest, model(largest))


def _terms(points: Sequence[Measured]) -> list[str]:
    """Terms that the points can tell apart, as long as there are more points than
    terms.
    """
    chosen: list[str] = []
    for name in TERMS:
        if len(chosen) + 1 < len(points) and np.linalg.matrix_rank(
            _matrix(points, [*chosen, name])
        ) > len(chosen):
            chosen.append(name)
    return chosen


def _matrix(points: Sequence[Measured], names: Sequence[str]) -> np.ndarray:
    return np.array([[TERMS[name][1](point) for name in names] for point in points])


def _relative_costs(points: Sequence[Measured], names: Sequence[str]) -> np.ndarray:
    """What every coefficient is multiplied with, by the point's seconds: [points,
    terms]. A model that fits gives 1.
    """
    seconds = np.array([point.seconds for point in points])
    return _matrix(points, names) / seconds[:, None]


def _solve(costs: np.ndarray) -> np.ndarray:
    """Coefficients that are not negative, by least squares of the relative errors."""
    size = np.maximum(
        np.abs(costs).max(0), 1e-300
    )  # so that the solver's tolerance means the same for every term
    coefficients, _ = nnls(costs / size, np.ones(len(costs)))
    return np.asarray(coefficients / size)
