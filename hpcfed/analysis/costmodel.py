"""A cost model: seconds per round as a sum of few terms, fitted to measurements, to
predict the gain from more ranks.

Coefficients are not negative, because each term is a cost. Errors are relative to the
time, so that short rounds matter as much as long ones.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isnan, log2, nan
from statistics import fmean

import numpy as np

from hpcfed.analysis.choices import Combination
from hpcfed.analysis.groups import Group


@dataclass(frozen=True)
class Measured:
    """A point that a model is fitted to."""

    clients: float
    """Clients that take part in a round."""
    ranks: int
    columns: float
    seconds: float
    """Per round."""
    steps: float = 1.0
    """Local steps of the client with the most steps in a round; others end earlier."""


Terms = dict[str, tuple[str, Callable[[Measured], float]]]
# The order matters: if points cannot separate two terms, the first is taken.
TERMS: Terms = {
    "every round": ("s", lambda m: 1.0),
    "per local step": ("s", lambda m: m.steps),
    "per step of a client of a rank": ("s", lambda m: m.steps * m.clients / m.ranks),
    "per step of a client of a rank, and million columns": (
        "s",
        lambda m: m.steps * m.clients / m.ranks * m.columns / 1e6,
    ),
    "per doubling of the ranks": ("s", lambda m: log2(m.ranks)),
    # A ring all-reduce sends 2 (n − 1) / n of a row from every rank.
    "per million columns that ranks exchange": (
        "s",
        lambda m: m.columns / 1e6 * 2 * (m.ranks - 1) / m.ranks,
    ),
}
"""By name: the coefficient's unit, and its factor."""


@dataclass(frozen=True)
class CostModel:
    coefficients: dict[str, float]
    """Seconds by the name of the term."""
    error: float
    """Mean relative error over the points used for the fit."""
    left_out_error: float
    """Mean relative error of each point predicted by a fit of the others; NaN if there
    are too few.
    """

    def __call__(self, point: Measured) -> float:
        """Predict the seconds of a round."""
        costs = []
        for name, coefficient in self.coefficients.items():
            _, cost = TERMS[name]
            costs.append(coefficient * cost(point))
        return sum(costs)


@dataclass(frozen=True)
class HeldOut:
    """The largest point, predicted by a fit of the others."""

    point: Measured
    predicted: float

    @property
    def error(self) -> float:
        """Error relative to the measurement."""
        return self.predicted / self.point.seconds - 1


@dataclass(frozen=True)
class Fitted:
    """A cost model, the points it was fitted to, and its quality."""

    key: Combination
    points: list[Measured]
    model: CostModel
    held_out: HeldOut | None


def fit_groups(every: Sequence[Group]) -> list[Fitted]:
    """Fit a model to each set of groups that differ only in clients, ranks, network."""
    families: dict[Combination, list[Measured]] = defaultdict(list)
    for group in every:
        if isnan(group.steps):
            # An older version did not count steps, which most terms need.
            continue
        # Networks differ in their columns, which are a term of the model.
        key = group.key.without("model")
        families[key].append(_measured(group))
    made = []
    for key, points in families.items():
        model = fit(points)
        if model is not None:
            held_out = hold_out(points)
            made.append(Fitted(key, points, model, held_out))
    return made


def _measured(group: Group) -> Measured:
    return Measured(
        clients=group.cohort,
        ranks=group.ranks,
        columns=group.columns,
        seconds=group.seconds.centre,
        steps=group.steps,
    )


def fit(points: Sequence[Measured]) -> CostModel | None:
    """Fit a model; None if the points cannot separate even two terms."""
    terms = _terms(points)
    if len(terms) < 2:
        return None
    costs = _relative_costs(points, terms)
    coefficients = nonnegative(costs)
    # Costs are divided by the measured seconds, so a perfect prediction is 1.
    errors = np.abs(costs @ coefficients - 1)
    left_out = []
    # With one point less, there must still be as many points as terms.
    if len(points) > len(terms):
        for number, cost in enumerate(costs):
            others = np.delete(costs, number, axis=0)
            predicted = float(cost @ nonnegative(others))
            left_out.append(abs(predicted - 1))
    return CostModel(
        coefficients=dict(zip(terms, coefficients.tolist(), strict=True)),
        error=float(errors.mean()),
        left_out_error=fmean(left_out) if left_out else nan,
    )


def hold_out(points: Sequence[Measured]) -> HeldOut | None:
    """Predict the point with most ranks, then most clients, by a fit of the others;
    None if these are too few.
    """
    largest = max(points, key=lambda m: (m.ranks, m.clients, m.columns))
    smaller = [point for point in points if point is not largest]
    model = fit(smaller)
    if model is None:
        return None
    return HeldOut(largest, model(largest))


def _terms(points: Sequence[Measured]) -> list[str]:
    """Choose terms that the points can separate, fewer than there are points."""
    chosen: list[str] = []
    for name in TERMS:
        if len(chosen) + 1 >= len(points):
            break
        matrix = _matrix(points, [*chosen, name])
        rank = np.linalg.matrix_rank(matrix)
        if rank > len(chosen):  # else it depends linearly on the terms before it
            chosen.append(name)
    return chosen


def _matrix(points: Sequence[Measured], names: Sequence[str]) -> np.ndarray:
    """Return the factors of all coefficients: [points, terms]."""
    columns = []
    for name in names:
        _, cost = TERMS[name]
        columns.append([cost(point) for point in points])
    return np.column_stack(columns)


def _relative_costs(points: Sequence[Measured], names: Sequence[str]) -> np.ndarray:
    """Divide each point's costs by its seconds: a model that fits gives 1."""
    # Without this, only the longest rounds would determine the fit.
    seconds = np.array([point.seconds for point in points])
    return _matrix(points, names) / seconds[:, None]


def nonnegative(costs: np.ndarray) -> np.ndarray:
    """Find coefficients ≥ 0 that minimise the squared relative errors."""
    from scipy.optimize import nnls  # late, for the reason given in statistics.py

    # Scaled, so that the solver's tolerance means the same for every term.
    largest = np.abs(costs).max(0)
    size = np.maximum(largest, 1e-300)  # a term may be 0 at all points
    ones = np.ones(len(costs))
    coefficients, _ = nnls(costs / size, ones)
    return np.asarray(coefficients / size)
