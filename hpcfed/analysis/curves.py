"""Curves over rounds, or over what was spent so far: means over seeds with their
intervals, with few enough points to be readable.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from hpcfed.analysis.render.charts import Line
from hpcfed.analysis.statistics import of_seeds

MOST_NAMES = 3
"""Most names of identical curves in a legend."""
MOST_POINTS = 60
"""Most points of a curve; more would only show noise, so they are averaged."""


def curve(
    name: str,
    by_seed: Sequence[np.ndarray],
    *,
    scale: float = 1.0,
    least: float = 0.0,
    most: float = inf,
) -> Line:
    """Return a series as means over seeds; unscaled, it is in `least` to `most`."""
    # Seeds may have stopped at the target after different numbers of rounds.
    shortest = min(map(len, by_seed), default=0)
    # This also works for a series without any record: no seeds, no rounds.
    cut = [values[:shortest] for values in by_seed]
    series = np.array(cut).reshape(len(by_seed), shortest)
    # Rounds that were not evaluated are NaN, and a diverged loss is infinite.
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
    """Merge identical curves, which would hide each other, under all their names."""
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
    """What one seed has reached, and had spent by then: virtual time or bytes."""

    spent: np.ndarray
    """After each round; never decreases."""
    reached: np.ndarray
    """After each round; NaN in rounds that were not evaluated."""

    def known(self) -> "Climb":
        """Return the climb over evaluated rounds only."""
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
    """Return what seeds have reached over what they have spent, as a mean with a band;
    without points if some seed was never evaluated.

    Seeds were evaluated at different times, so each is interpolated linearly between
    its evaluations. The curve begins where every seed has an evaluation, and ends with
    the first seed that ends. The spent amount is multiplied by `across`; `log` spaces
    the points of a long curve by factors.
    """
    seeds = [climb.known() for climb in climbs]
    if not seeds or not all(len(seed.spent) for seed in seeds):
        return Line(name, [], [])
    y, low, high = [], [], []
    places = _places([seed.spent for seed in seeds], log=log)
    # Within the range that all seeds share, so nothing is extrapolated.
    by_seed = [np.interp(places, seed.spent, seed.reached) for seed in seeds]
    for values in scale * np.transpose(by_seed):
        estimate = of_seeds(values.tolist(), least=scale * least, most=scale * most)
        y.append(estimate.centre)
        low.append(estimate.low)
        high.append(estimate.high)
    x = (across * places).tolist()
    return Line(name, x, y, low, high, band=True)


def _places(spent: Sequence[np.ndarray], *, log: bool) -> np.ndarray:
    """Return the x values of a curve: every evaluation within the range that all seeds
    share or, if these are too many, evenly spaced values.
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
    """Cut numbers into windows, each drawn as one point; few stay single."""
    points = min(len(numbers), most or MOST_POINTS)
    return np.array_split(numbers, points) if points else []
