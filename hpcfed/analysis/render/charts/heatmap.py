"""Heat maps: a table of numbers as colours."""

from collections.abc import Sequence

import numpy as np

from hpcfed.analysis.render.charts.drawing import (
    NUMBERS,
    Axis,
    Drawing,
    Record,
    Spec,
    chart,
    clicks,
    short,
    tip,
)

MOST_ACROSS = 75
"""Cells beside each other; more are put together as means."""
MOST_DOWN = 100


def heatmap(
    title: str,
    values: np.ndarray,
    x: Axis,
    y: Axis,
    colour: Axis,
    *,
    first: tuple[float, float] = (0, 0),
    span: Sequence[float] = (),
) -> Drawing:
    """Draw a table [down, across] of numbers; cells without one stay empty.

    `first` is the number of the first column and of the first row. `span` holds the
    ends of the colours, where they must not be those of the values.
    """
    down, across = (_bin(size, most) for size, most in _sizes(values))
    cells = _means(values, down, across)
    data: list[Record] = []
    for row, column in np.argwhere(np.isfinite(cells)).tolist():
        # A cell's middle is at its number, so it begins half a number before.
        left = first[0] + column * across - 0.5
        top = first[1] + row * down - 0.5
        data.append({"x": left, "y": top, "value": short(cells[row, column])})
    ends = (first[0] + values.shape[1] - 0.5, first[1] + values.shape[0] - 0.5)
    spec = chart(
        f"{colour.label} by {x.label} and {y.label}",
        data,
        [_layer(x, y, colour, (across, down), ends, span)],
    )
    return Drawing(title, spec, dense=True)


def _sizes(values: np.ndarray) -> tuple[tuple[int, int], tuple[int, int]]:
    return (values.shape[0], MOST_DOWN), (values.shape[1], MOST_ACROSS)


def _bin(size: int, most: int) -> int:
    """Return how many numbers one cell stands for."""
    return max(1, -(-size // most))


def _means(values: np.ndarray, down: int, across: int) -> np.ndarray:
    """Return the mean of the known values of every cell."""
    known = np.isfinite(values)
    sums = _sums(np.where(known, values, 0.0), down, across)
    counts = _sums(known.astype(float), down, across)
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)


def _sums(values: np.ndarray, down: int, across: int) -> np.ndarray:
    rows = np.add.reduceat(values, np.arange(0, values.shape[0], down), 0)
    return np.add.reduceat(rows, np.arange(0, values.shape[1], across), 1)


def _layer(
    x: Axis,
    y: Axis,
    colour: Axis,
    steps: tuple[int, int],
    ends: tuple[float, float],
    span: Sequence[float],
) -> Spec:
    scale: Spec = {"domain": list(span)} if span else {}
    across, down = x.encoding("x"), y.encoding("y")
    for encoding, end in ((across, ends[0]), (down, ends[1])):
        encoding["scale"] |= {"nice": False, "domainMax": end}
    # Rows are read from the top, as in a table.
    down["scale"]["reverse"] = True
    tips = [tip("to_x" if steps[0] > 1 else "at_x", _to(x.label, steps[0]))]
    tips.append(tip("to_y" if steps[1] > 1 else "at_y", _to(y.label, steps[1])))
    return {
        "transform": [
            {"calculate": f"min(datum.x + {steps[0]}, {ends[0]})", "as": "x2"},
            {"calculate": f"min(datum.y + {steps[1]}, {ends[1]})", "as": "y2"},
            {"calculate": "datum.x + 0.5", "as": "at_x"},
            {"calculate": "datum.y + 0.5", "as": "at_y"},
            {"calculate": "datum.x2 - 0.5", "as": "to_x"},
            {"calculate": "datum.y2 - 0.5", "as": "to_y"},
        ],
        "params": clicks([]),
        "mark": {"type": "rect", "clip": True},
        "encoding": {
            "x": across,
            "x2": {"field": "x2"},
            "y": down,
            "y2": {"field": "y2"},
            "color": {
                "field": "value",
                "type": "quantitative",
                "title": colour.label,
                "scale": scale,
                "legend": {"format": NUMBERS},
            },
            "tooltip": [*tips, tip("value", colour.label)],
        },
    }


def _to(label: str, step: int) -> str:
    return f"{label}, {step} up to" if step > 1 else label
