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
    layer,
    series_colour,
    short,
    tips,
)
from hpcfed.analysis.render.charts.points import names_above

STRIPE = 46
"""Height of a horizontal bar with its name."""
LEVEL_LETTERS = 48
"""Total length of names that stay horizontal under vertical bars; longer ones are
rotated.
"""

Segments = Mapping[str, Sequence[float]]
"""The value in each bar, by segment name."""


def bars(
    title: str, categories: Sequence[str], segments: Segments, y: Axis, x_label: str
) -> Drawing:
    """Draw a vertical bar for each category, with all segments stacked."""
    level = sum(map(len, categories)) <= LEVEL_LETTERS
    across: Spec = {"field": "x", "type": "ordinal", "title": x_label, "sort": None}
    across["axis"] = {"labelAngle": 0 if level else -35}
    data, stacks = _stacked(categories, segments, y, {"x": across}, along="y")
    return Drawing(title, chart(f"{y.label} by {x_label}", data, [stacks]))


def stripes(
    title: str, categories: Sequence[str], segments: Segments, x: Axis
) -> Drawing:
    """Draw a horizontal bar for each category, below its name: for a few long names."""
    row = {"field": "x", "type": "ordinal", "sort": None, "axis": None}
    data, stacks = _stacked(categories, segments, x, {"y": row}, along="x")
    stacks["mark"] |= {"height": 15, "yOffset": 9}
    layers = [stacks, names_above(row, "x", -9)]
    height = STRIPE * max(1, len(set(categories)))
    return Drawing(title, chart(f"{x.label} by options", data, layers, height))


def _stacked(
    categories: Sequence[str], segments: Segments, axis: Axis, place: Spec, along: str
) -> tuple[list[Record], Spec]:
    """Return the data and the layer of stacked bars along one direction."""
    # Without the segments that are zero everywhere, which keep their colours.
    shown = [name for name, values in segments.items() if max(values, default=0.0) > 0]
    data: list[Record] = []
    for order, name in enumerate(shown):
        for category, value in zip(categories, segments[name], strict=True):
            record = {"x": category, "series": name, "y": short(value), "order": order}
            data.append(record)
    # The name of a single segment says nothing.
    told = {"x": "title"} if len(shown) == 1 else {"x": "title", "series": "what"}
    measure: Spec = {"field": "y", "type": "quantitative", "title": axis.label}
    encoding = {
        **place,
        along: measure | {"stack": "zero", "axis": {"format": NUMBERS}},
        "color": series_colour(list(segments), shown=shown),
        "order": {"field": "order", "type": "ordinal"},
        "tooltip": tips(told, {"y": axis.label}),
    }
    return data, layer("bar", encoding, names=shown, zoom=())


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
    shown = list(dict.fromkeys(stretch.series for stretch in stretches))
    data: list[Record] = []
    for one in stretches:
        record = {"row": one.row, "x": short(one.start), "x2": short(one.end)}
        took = short(one.end - one.start)
        data.append(record | {"series": one.series, "took": took})
    across = x.encoding("x")
    across["scale"]["nice"] = False  # the axis ends with the last interval
    encoding = {
        "x": across,
        "x2": {"field": "x2"},
        "y": {"field": "row", "type": "nominal", "sort": None, "title": None},
        "color": series_colour(names or shown, shown=shown),
        "tooltip": tips({"row": "title", "series": "phase"}, {"took": x.label}),
    }
    drawn = layer("bar", encoding, names=shown, zoom=["x"], clip=True)
    height = LANE * len({stretch.row for stretch in stretches})
    spec = chart(f"{x.label} by row", data, [drawn], height)
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
    name, drawn as vertical lines with their names in the legend.
    """
    known = np.asarray([value for value in values if x.shows(value)])
    # The square-root rule, within limits that a reader can take in.
    bins = int(min(MOST_BINS, max(4, np.ceil(np.sqrt(len(known))))))
    counts, edges = np.histogram(known, bins=bins)
    data: list[Record] = []
    for number, count in enumerate(counts.tolist()):
        left, right = edges[number], edges[number + 1]
        data.append({"x": short(left), "x2": short(right), "y": count})
    told = {"x": f"{x.label}: from", "x2": "to", "y": counted}
    encoding = {
        "x": x.encoding("x"),
        "x2": {"field": "x2"},
        "y": Axis(counted, zero=True, whole=True).encoding("y"),
        "y2": {"datum": 0},
        "tooltip": tips({}, told),
    }
    layers = [layer("rect", encoding, style="bin")]
    if marks:
        # The columns have the first colour.
        colour = series_colour(["columns", *marks], shown=list(marks))
        # Colour and dash both differ, for readers who cannot distinguish colours; one
        # legend shows both.
        colour["legend"] = {"columns": 1, "values": list(marks), "symbolType": "stroke"}
        rule = {
            "x": x.encoding("x"),
            "color": colour,
            "strokeDash": {**colour, "scale": {**colour["scale"], "range": DASHES}},
            "tooltip": tips({"series": "title"}, {"x": x.label}),
        }
        figures = [{"series": name, "x": short(at)} for name, at in marks.items()]
        layers.append(layer("rule", rule, data=figures, size=2.5))
    return Drawing(title, chart(f"{counted} by {x.label}", data, layers))


# Heat maps: a table of numbers as colours.

MOST_CELLS = (100, 75)
"""Most cells below each other and side by side; more are averaged."""


def heatmap(
    title: str,
    values: np.ndarray,
    x: Axis,
    y: Axis,
    colour: Axis,
    *,
    first: tuple[float, float] = (0, 0),
) -> Drawing:
    """Draw a table [down, across] of numbers; cells without a number stay empty.
    `first` is the number of the first column and of the first row.
    """
    # How many numbers one cell represents.
    down, across = np.maximum(1, -(-np.array(values.shape) // MOST_CELLS)).tolist()
    cells = _means(values, down, across)
    data: list[Record] = []
    for row, column in np.argwhere(np.isfinite(cells)).tolist():
        # A cell is centred at its number, so it begins half a unit before.
        left = first[0] + column * across - 0.5
        top = first[1] + row * down - 0.5
        data.append({"x": left, "y": top, "value": short(cells[row, column])})
    encoding: Spec = {
        "color": {
            "field": "value",
            "type": "quantitative",
            "title": colour.label,
            "scale": {},
            "legend": {"format": NUMBERS},
        }
    }
    transform = []
    told = {}
    for name, axis, step, start, size in (
        ("x", x, across, first[0], values.shape[1]),
        ("y", y, down, first[1], values.shape[0]),
    ):
        end = start + size - 0.5
        encoding[name] = axis.encoding(name)
        encoding[name]["scale"] |= {"nice": False, "domainMax": end}
        encoding[f"{name}2"] = {"field": f"{name}2"}
        for calculated, field in (
            (f"min(datum.{name} + {step}, {end})", f"{name}2"),
            (f"datum.{name} + 0.5", f"at_{name}"),
            (f"datum.{name}2 - 0.5", f"to_{name}"),
        ):
            transform.append({"calculate": calculated, "as": field})
        if step > 1:
            told[f"to_{name}"] = f"{axis.label}, {step} up to"
        else:
            told[f"at_{name}"] = axis.label
    # Rows are read from the top, as in a table.
    encoding["y"]["scale"]["reverse"] = True
    encoding["tooltip"] = tips({}, {**told, "value": colour.label})
    drawn = layer("rect", encoding, zoom=("x", "y"), clip=True)
    drawn["transform"] = transform
    description = f"{colour.label} by {x.label} and {y.label}"
    return Drawing(title, chart(description, data, [drawn]), dense=True)


def _means(values: np.ndarray, down: int, across: int) -> np.ndarray:
    """Return the mean of each cell's known values."""
    known = np.isfinite(values)
    sums = []
    for table in (np.where(known, values, 0.0), known.astype(float)):
        # reduceat sums unequal last blocks, too, which a reshape could not.
        rows = np.add.reduceat(table, np.arange(0, table.shape[0], down), 0)
        sums.append(np.add.reduceat(rows, np.arange(0, table.shape[1], across), 1))
    total, counts = sums
    return np.divide(total, counts, out=np.full_like(total, np.nan), where=counts > 0)
