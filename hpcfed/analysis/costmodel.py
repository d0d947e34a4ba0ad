"""The one cost model: seconds, or bytes, as a sum of counted work times coefficients.

Coefficients are not negative, because each term is a cost. They are fitted to measured
points by least squares of relative errors, so that short rounds matter as much as long
ones. How good a fit is, is checked by predicting each point from the others.

Plans use the model with the work that they count. Reports fit a few fixed terms to the
rounds of a study, to predict the gain from more ranks.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isnan, log2, nan
from statistics import fmean
from typing import Any, TypeVar

import numpy as np

from hpcfed.analysis.choices import Combination
from hpcfed.analysis.groups import Group

T = TypeVar("T")
Work = Callable[[Any], Sequence[float]]
"""Counts the work of a measured or predicted point, term by term."""
LEAST_WIDTH = 0.05
"""Half the minimum width of an interval: two calls on one machine differ by as much."""


@dataclass(frozen=True)
class FittedCost:
    """Predicts the cost of a point from its work."""

    work: Work
    coefficients: list[float]
    """The cost of a unit of each term."""

    def __call__(self, point: Any) -> float:
        return float(np.dot(self.work(point), self.coefficients))


def fit_cost(points: Sequence[T], work: Work, cost: Callable[[T], float]) -> FittedCost:
    """Find coefficients ≥ 0 that minimise the squared relative errors."""
    # Late, for the reason given in statistics.py.
    from scipy.optimize import nnls

    measured = np.array([cost(point) for point in points])
    # Divided by what was measured, so a perfect prediction of each point is 1.
    shares = np.array([work(point) for point in points]) / measured[:, None]
    # Scaled, so that the solver's tolerance means the same for every term.
    largest = np.abs(shares).max(0)
    size = np.maximum(largest, 1e-300)  # a term may be 0 at all points
    coefficients, _ = nnls(shares / size, np.ones(len(shares)))
    return FittedCost(work, (coefficients / size).tolist())


def leaving_out(points: Sequence[T]) -> Iterator[tuple[T, list[T]]]:
    """Yield each point with all the others."""
    for number, point in enumerate(points):
        yield point, [*points[:number], *points[number + 1 :]]


@dataclass(frozen=True)
class Range:
    """A prediction and the interval around it."""

    middle: float
    low: float
    high: float

    def __add__(self, other: "Range") -> "Range":
        return Range(
            self.middle + other.middle, self.low + other.low, self.high + other.high
        )

    def __mul__(self, factor: float) -> "Range":
        return Range(self.middle * factor, self.low * factor, self.high * factor)


def ranged(
    points: Sequence[T],
    predict: Callable[[Sequence[T]], float],
    *others: Callable[[], float],
    keep: Callable[[Sequence[T]], bool],
    width: float = LEAST_WIDTH,
) -> Range:
    """Predict from all points. The interval covers the predictions without any one of
    them, if `keep` accepts the rest, the predictions of `others`, and the share `width`
    either way.
    """
    middle = predict(points)
    found = [middle * (1 - width), middle * (1 + width)]
    found += [other() for other in others]
    found += [predict(rest) for _, rest in leaving_out(points) if keep(rest)]
    return Range(middle, min(found), max(found))


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


# The order matters: if points cannot separate two terms, the first is taken.
TERMS: dict[str, Callable[[Measured], float]] = {
    "every round": lambda m: 1.0,
    "per local step": lambda m: m.steps,
    "per step of a client of a rank": lambda m: m.steps * m.clients / m.ranks,
    "per step of a client of a rank, and million columns": lambda m: (
        m.steps * m.clients / m.ranks * m.columns / 1e6
    ),
    "per doubling of the ranks": lambda m: log2(m.ranks),
    # A ring all-reduce sends 2 (n − 1) / n of a row from every rank.
    "per million columns that ranks exchange": lambda m: (
        m.columns / 1e6 * 2 * (m.ranks - 1) / m.ranks
    ),
}
"""Counts the work of each term by its name; a coefficient is in seconds."""


@dataclass(frozen=True)
class CostModel:
    coefficients: dict[str, float]
    """Seconds by the name of the term."""
    error: float
    """Mean relative error over the points used for the fit."""
    left_out_error: float
    """Mean relative error of each point as predicted from the others; NaN if these are
    too few.
    """

    def __call__(self, point: Measured) -> float:
        """Predict the seconds of a round."""
        work = _work(list(self.coefficients))
        return FittedCost(work, list(self.coefficients.values()))(point)


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
    cost = _fit_terms(points, terms)
    left_out = []
    # With one point less, there must still be as many points as terms.
    if len(points) > len(terms):
        for point, others in leaving_out(points):
            left_out.append(_error(_fit_terms(others, terms), point))
    return CostModel(
        coefficients=dict(zip(terms, cost.coefficients, strict=True)),
        error=fmean(_error(cost, point) for point in points),
        left_out_error=fmean(left_out) if left_out else nan,
    )


def _fit_terms(points: Sequence[Measured], names: Sequence[str]) -> FittedCost:
    return fit_cost(points, _work(names), lambda point: point.seconds)


def _error(cost: FittedCost, point: Measured) -> float:
    return abs(cost(point) / point.seconds - 1)


def hold_out(points: Sequence[Measured]) -> HeldOut | None:
    """Predict the point with most ranks by the others; None if these are too few."""
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
        work = _work([*chosen, name])
        # Terms that are proportional over these points would share a cost arbitrarily.
        rank = np.linalg.matrix_rank([work(point) for point in points])
        if rank > len(chosen):  # else it depends linearly on the terms before it
            chosen.append(name)
    return chosen


def _work(names: Sequence[str]) -> Work:
    """Return what counts the work of these terms."""
    return lambda point: [TERMS[name](point) for name in names]
