"""Charts of filled shapes: stacked bars, timelines, histograms and heat maps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hpcfed.analysis.render.charts.drawing import (
    NUMBERS,
    Axis,
    Drawing,
    Record,
    Spec,
    chart,
)
from hpcfed.analysis.render.charts.marks import interactive, series_colour, short, tips

STRIPE = 46
"""Height of a horizontal bar with its name."""
LEVEL_LETTERS = 48
"""Total length of names that stay horizontal under vertical bars; longer ones are
rotated.
"""

Segments = Mapping[str, Sequence[float]]
"""The value in each bar, by segment name."""


def bars(
    title: str,
    categories: Sequence[str],
    segments: Segments,
    y: Axis,
    x_label: str,
) -> Drawing:
    """Draw a vertical bar for each category, with all segments stacked."""
    shown = _shown(segments)
    level = sum(map(len, categories)) <= LEVEL_LETTERS
    across = {
        "field": "x",
        "type": "ordinal",
        "title": x_label,
        "sort": None,
        "axis": {"labelAngle": 0 if level else -35},
    }
    layer = _layer(segments, shown, y, bar="x", length="y")
    layer["encoding"]["x"] = across
    spec = chart(f"{y.label} by {x_label}", _records(categories, shown), [layer])
    return Drawing(title, spec)


def stripes(
    title: str, categories: Sequence[str], segments: Segments, x: Axis
) -> Drawing:
    """Draw a horizontal bar for each category, below its name: for a few long names."""
    shown = _shown(segments)
    where = {"field": "x", "type": "ordinal", "sort": None, "axis": None}
    layer = _layer(segments, shown, x, bar="y", length="x")
    layer["mark"] |= {"height": 15, "yOffset": 9}
    layer["encoding"]["y"] = where
    text: Spec = {
        "transform": [{"aggregate": [{"op": "count"}], "groupby": ["x"]}],
        "mark": {"type": "text", "style": "bar-name", "dy": -9, "limit": 520},
        "encoding": {
            "y": where,
            "x": {"value": 2},
            "text": {"field": "x", "type": "nominal"},
        },
    }
    data = _records(categories, shown)
    spec = chart(f"{x.label} by options", data, [layer, text])
    spec["height"] = STRIPE * max(1, len(set(categories)))
    return Drawing(title, spec)


def _shown(segments: Segments) -> Segments:
    """Return the segments that are above zero anywhere."""
    return {
        name: values
        for name, values in segments.items()
        if max(values, default=0.0) > 0
    }


def _records(categories: Sequence[str], segments: Segments) -> list[Record]:
    records = []
    for order, (name, values) in enumerate(segments.items()):
        for category, value in zip(categories, values, strict=True):
            record = {"x": category, "series": name, "y": short(value), "order": order}
            records.append(record)
    return records


def _layer(
    segments: Segments, shown: Segments, axis: Axis, *, bar: str, length: str
) -> Spec:
    """Return bars along one direction, without their positions."""
    names = list(segments)
    measure: Spec = {
        "field": "y",
        "type": "quantitative",
        "title": axis.label,
        "stack": "zero",
        "axis": {"format": NUMBERS},
    }
    # Names are above horizontal bars; vertical ones have theirs under the axis.
    told = {"x": "title"} if len(shown) == 1 else {"x": "title", "series": "what"}
    return {
        **interactive(list(shown), zoom=()),
        "mark": {"type": "bar"},
        "encoding": {
            length: measure,
            "color": series_colour(names, shown=list(shown)),
            "order": {"field": "order", "type": "ordinal"},
            "tooltip": tips(told, {"y": axis.label}),
        },
    }


# Timelines: what each of several rows did, and when.

LANE = 26
"""Height of a row."""


@dataclass(frozen=True)
class Stretch:
    row: str
    """For example a rank."""
    start: float
    end: float
    series: str
    """What it did, which determines the colour."""


def timeline(
    title: str, stretches: Sequence[Stretch], x: Axis, *, names: Sequence[str] = ()
) -> Drawing:
    """Draw intervals of time in their rows. `names` fixes the order of the colours."""
    rows = list(dict.fromkeys(stretch.row for stretch in stretches))
    shown = list(dict.fromkeys(stretch.series for stretch in stretches))
    data: list[Record] = []
    for stretch in stretches:
        took = short(stretch.end - stretch.start)
        record = {
            "row": stretch.row,
            "x": short(stretch.start),
            "x2": short(stretch.end),
        }
        data.append(record | {"series": stretch.series, "took": took})
    across = x.encoding("x")
    across["scale"]["nice"] = False  # the axis ends with the last interval
    layer = {
        **interactive(shown, zoom=["x"]),
        "mark": {"type": "bar", "clip": True},
        "encoding": {
            "x": across,
            "x2": {"field": "x2"},
            "y": {"field": "row", "type": "nominal", "sort": None, "title": None},
            "color": series_colour(names or shown, shown=shown),
            "tooltip": tips({"row": "title", "series": "phase"}, {"took": x.label}),
        },
    }
    spec = chart(f"{x.label} by row", data, [layer])
    spec["height"] = LANE * len(rows)
    return Drawing(title, spec, dense=len(data) > 1000)


# Histograms, with statistics of the distribution marked in them.

MOST_BINS = 20
DASHES = [[1, 0], [7, 3], [1, 0], [3, 3]]
"""Patterns of columns and of the first marks; Vega's own third pattern is hardly
visible.
"""


def histogram(
    title: str,
    values: Sequence[float],
    x: Axis,
    *,
    counted: str,
    marks: Mapping[str, float] | None = None,
) -> Drawing:
    """Draw a histogram of values; `counted` says what they are. `marks` are figures by
    name, drawn as vertical lines.
    """
    known = np.asarray([value for value in values if x.shows(value)])
    counts, edges = np.histogram(known, bins=_bins(known))
    data: list[Record] = []
    for number, count in enumerate(counts.tolist()):
        left, right = edges[number], edges[number + 1]
        data.append({"x": short(left), "x2": short(right), "y": count})
    y = Axis(counted, zero=True, whole=True)
    layers = [_bars_of_bins(x, y), *_marks(marks or {}, x)]
    return Drawing(title, chart(f"{counted} by {x.label}", data, layers))


def _bins(values: np.ndarray) -> int:
    """Return about the square root of the number of values."""
    return int(min(MOST_BINS, max(4, np.ceil(np.sqrt(len(values))))))


def _bars_of_bins(x: Axis, y: Axis) -> Spec:
    return {
        "mark": {"type": "rect", "style": "bin"},
        "encoding": {
            "x": x.encoding("x"),
            "x2": {"field": "x2"},
            "y": y.encoding("y"),
            "y2": {"datum": 0},
            "tooltip": tips({}, {"x": f"{x.label}: from", "x2": "to", "y": y.label}),
        },
    }


def _marks(marks: Mapping[str, float], x: Axis) -> list[Spec]:
    """Draw a vertical line for each figure, with its name in the legend."""
    data = [{"series": name, "x": short(value)} for name, value in marks.items()]
    if not data:
        return []
    # The columns have the first colour.
    colour = series_colour(["columns", *marks], shown=list(marks))
    # Colour and dash both differ, for readers who cannot distinguish colours; one
    # legend shows both.
    colour["legend"] = {"columns": 1, "values": list(marks), "symbolType": "stroke"}
    return [
        {
            "data": {"values": data},
            "mark": {"type": "rule", "size": 2.5},
            "encoding": {
                "x": x.encoding("x"),
                "color": colour,
                "strokeDash": {**colour, "scale": {**colour["scale"], "range": DASHES}},
                "tooltip": tips({"series": "title"}, {"x": x.label}),
            },
        }
    ]


# Heat maps: a table of numbers as colours.

MOST_ACROSS = 75
"""Most cells side by side; more are averaged."""
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
    """Draw a table [down, across] of numbers; cells without a number stay empty.

    `first` is the number of the first column and of the first row. `span` sets the ends
    of the colour scale, if they should not be those of the values.
    """
    down, across = (_numbers_per_cell(size, most) for size, most in _sizes(values))
    cells = _means(values, down, across)
    data: list[Record] = []
    for row, column in np.argwhere(np.isfinite(cells)).tolist():
        # A cell is centred at its number, so it begins half a unit before.
        left = first[0] + column * across - 0.5
        top = first[1] + row * down - 0.5
        data.append({"x": left, "y": top, "value": short(cells[row, column])})
    ends = (first[0] + values.shape[1] - 0.5, first[1] + values.shape[0] - 0.5)
    spec = chart(
        f"{colour.label} by {x.label} and {y.label}",
        data,
        [_cells(x, y, colour, (across, down), ends, span)],
    )
    return Drawing(title, spec, dense=True)


def _sizes(values: np.ndarray) -> tuple[tuple[int, int], tuple[int, int]]:
    return (values.shape[0], MOST_DOWN), (values.shape[1], MOST_ACROSS)


def _numbers_per_cell(size: int, most: int) -> int:
    """Return how many numbers one cell represents."""
    return max(1, -(-size // most))


def _means(values: np.ndarray, down: int, across: int) -> np.ndarray:
    """Return the mean of each cell's known values."""
    known = np.isfinite(values)
    sums = _sums(np.where(known, values, 0.0), down, across)
    counts = _sums(known.astype(float), down, across)
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)


def _sums(values: np.ndarray, down: int, across: int) -> np.ndarray:
    rows = np.add.reduceat(values, np.arange(0, values.shape[0], down), 0)
    return np.add.reduceat(rows, np.arange(0, values.shape[1], across), 1)


def _cells(
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
    told = {}
    for field, axis, step in (("x", x, steps[0]), ("y", y, steps[1])):
        if step > 1:
            told[f"to_{field}"] = f"{axis.label}, {step} up to"
        else:
            told[f"at_{field}"] = axis.label
    return {
        **interactive([], zoom=("x", "y")),
        "transform": [
            {"calculate": f"min(datum.x + {steps[0]}, {ends[0]})", "as": "x2"},
            {"calculate": f"min(datum.y + {steps[1]}, {ends[1]})", "as": "y2"},
            {"calculate": "datum.x + 0.5", "as": "at_x"},
            {"calculate": "datum.y + 0.5", "as": "at_y"},
            {"calculate": "datum.x2 - 0.5", "as": "to_x"},
            {"calculate": "datum.y2 - 0.5", "as": "to_y"},
        ],
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
            "tooltip": tips({}, {**told, "value": colour.label}),
        },
    }
