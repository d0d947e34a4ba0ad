"""Curves over rounds: means of seeds with their intervals, in few enough points to see."""

from collections.abc import Sequence
from math import inf

import numpy as np

from hpcfed.report.charts import Line
from hpcfed.report.statistics import of_seeds

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


def windows(numbers: np.ndarray, most: int | None = None) -> list[np.ndarray]:
    """Cut numbers into windows that are drawn as a point each; of one if they are few."""
    points = min(len(numbers), most or MOST_POINTS)
    return np.array_split(numbers, points) if points else []
