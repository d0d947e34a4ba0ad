"""Curves over rounds, or over what was spent by then: means of seeds with their
intervals, in few enough points to see.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from hpcfed.analysis.render.charts import Line
from hpcfed.analysis.statistics import of_seeds

MOST_NAMES = 3
"""Names of equal curves that stand in the legend."""
MOST_POINTS = 60
"""Points of a curve; more would only be noise, and are drawn as means."""


def curve(
    name: str,
    by_seed: Sequence[np.ndarray],
    *,
    scale: float = 1.0,
    least: float = 0.0,
    most: float = inf,
) -> Line:
    """Return a series over rounds, its mean over seeds with a band; without points where
    there is nothing.

    `scale` is what values are multiplied by, `least` and `most` what they lie between
    before.
    """
    # Seeds may have stopped at the target after different numbers of rounds.
    shortest = min(map(len, by_seed), default=0)
    # Also where nobody has recorded it: no seeds, no rounds.
    cut = [values[:shortest] for values in by_seed]
    series = np.array(cut).reshape(len(by_seed), shortest)
    # Rounds that were not evaluated are NaN, and a loss that has diverged is infinite.
    known = np.flatnonzero(np.isfinite(series).all(0)) if len(by_seed) else np.empty(0)
    x, y, low, high = [], [], [], []
    for window in windows(known):
        means = scale * series[:, window].mean(1)
        estimate = of_seeds(means.tolist(), least=scale * least, most=scale * most)
        x.append(float(window.mean()) + 1)  # people count from 1
        y.append(estimate.centre)
        low.append(estimate.low)
        high.append(estimate.high)
    return Line(name, x, y, low, high, band=True)


def merged(curves: Sequence[Line]) -> list[Line]:
    """Put equal curves together, which would hide each other, under all their names."""
    alike: dict[tuple[tuple[float, ...], ...], list[Line]] = {}
    for one in curves:
        alike.setdefault((tuple(one.x), tuple(one.y)), []).append(one)
    found = []
    for several in alike.values():
        name = " = ".join(one.name for one in several[:MOST_NAMES])
        if len(several) > MOST_NAMES:
            name += f" = {len(several) - MOST_NAMES} more"
        found.append(replace(several[0], name=name))
    return found


@dataclass(frozen=True)
class Climb:
    """What one seed has reached, and what it had spent by then: virtual time, bytes."""

    spent: np.ndarray
    """After every round; it never falls."""
    reached: np.ndarray
    """After every round; NaN in rounds that were not evaluated."""

    def known(self) -> "Climb":
        """Return the climb over evaluated rounds alone."""
        known = np.isfinite(self.reached) & np.isfinite(self.spent)
        return Climb(self.spent[known], self.reached[known])


def curve_over(
    name: str,
    climbs: Sequence[Climb],
    *,
    scale: float = 1.0,
    across: float = 1.0,
    log: bool = False,
    least: float = 0.0,
    most: float = inf,
) -> Line:
    """Return what seeds have reached over what they have spent, their mean with a band;
    without points where some seed was never evaluated.

    Seeds were evaluated at different times, so each lies on straight lines between its
    evaluations. The curve begins where every seed has one, and ends with the first seed
    that ends. `across` is what the spent is multiplied by; `log` spaces the points of a
    long curve by factors.
    """
    seeds = [climb.known() for climb in climbs]
    if not seeds or not all(len(seed.spent) for seed in seeds):
        return Line(name, [], [])
    y, low, high = [], [], []
    places = _places([seed.spent for seed in seeds], log=log)
    by_seed = [np.interp(places, seed.spent, seed.reached) for seed in seeds]
    for values in scale * np.transpose(by_seed):
        estimate = of_seeds(values.tolist(), least=scale * least, most=scale * most)
        y.append(estimate.centre)
        low.append(estimate.low)
        high.append(estimate.high)
    x = (across * places).tolist()
    return Line(name, x, y, low, high, band=True)


def _places(spent: Sequence[np.ndarray], *, log: bool) -> np.ndarray:
    """Return where a curve has points: at every evaluation that all seeds' spans have in
    common or, of too many, at even distances.
    """
    first = max(float(of_seed[0]) for of_seed in spent)
    last = min(float(of_seed[-1]) for of_seed in spent)
    if last < first:  # a seed ended before another was evaluated
        return np.empty(0)
    together = np.unique(np.concatenate(spent))
    inside = together[(together >= first) & (together <= last)]
    if len(inside) <= MOST_POINTS:
        return inside
    if log and first > 0:
        return np.geomspace(first, last, MOST_POINTS)
    return np.linspace(first, last, MOST_POINTS)


def windows(numbers: np.ndarray, most: int | None = None) -> list[np.ndarray]:
    """Cut numbers into windows that are drawn as a point each; of one if they are few."""
    points = min(len(numbers), most or MOST_POINTS)
    return np.array_split(numbers, points) if points else []
