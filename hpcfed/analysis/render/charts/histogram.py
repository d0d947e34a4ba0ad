"""Histograms, with figures of the distribution marked in them."""

from collections.abc import Mapping, Sequence

import numpy as np

from hpcfed.analysis.render.charts.drawing import (
    Axis,
    Drawing,
    Record,
    Spec,
    chart,
    series_colour,
    short,
    tip,
    tip_name,
)

MOST_BINS = 20
DASHES = [[1, 0], [7, 3], [1, 0], [3, 3]]
"""Patterns of columns and of the first marks; the third of Vega's own is hardly seen."""


def histogram(
    title: str,
    values: Sequence[float],
    x: Axis,
    *,
    counted: str,
    marks: Mapping[str, float] | None = None,
) -> Drawing:
    """Draw how many values lie where; `counted` says of what. `marks` are figures by
    name, drawn as upright lines.
    """
    known = np.asarray([value for value in values if x.shows(value)])
    counts, edges = np.histogram(known, bins=_bins(known))
    data: list[Record] = []
    for number, count in enumerate(counts.tolist()):
        left, right = edges[number], edges[number + 1]
        data.append({"x": short(left), "x2": short(right), "y": count})
    y = Axis(counted, zero=True, whole=True)
    layers = [_columns(x, y), *_marks(marks or {}, x)]
    return Drawing(title, chart(f"{counted} by {x.label}", data, layers))


def _bins(values: np.ndarray) -> int:
    """Return about as many bins as the root of the number of values."""
    return int(min(MOST_BINS, max(4, np.ceil(np.sqrt(len(values))))))


def _columns(x: Axis, y: Axis) -> Spec:
    return {
        "mark": {"type": "rect", "style": "bin"},
        "encoding": {
            "x": x.encoding("x"),
            "x2": {"field": "x2"},
            "y": y.encoding("y"),
            "y2": {"datum": 0},
            "tooltip": [
                tip("x", f"{x.label}: from"),
                tip("x2", "to"),
                tip("y", y.label),
            ],
        },
    }


def _marks(marks: Mapping[str, float], x: Axis) -> list[Spec]:
    """Draw an upright line for each figure; their names stand in the legend."""
    data = [{"series": name, "x": short(value)} for name, value in marks.items()]
    if not data:
        return []
    # The columns have the first colour.
    colour = series_colour(["columns", *marks], shown=list(marks))
    # Both differ, for those who cannot tell the colours; one legend tells both.
    colour["legend"] = {"columns": 1, "values": list(marks), "symbolType": "stroke"}
    return [
        {
            "data": {"values": data},
            "mark": {"type": "rule", "size": 2.5},
            "encoding": {
                "x": x.encoding("x"),
                "color": colour,
                "strokeDash": {**colour, "scale": {**colour["scale"], "range": DASHES}},
                "tooltip": [tip_name(), tip("x", x.label)],
            },
        }
    ]
