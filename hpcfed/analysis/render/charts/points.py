"""Charts of points with their intervals: rows of points by name, and points over two
axes.

An interval is a bar with two ends: a short line where the interval ends, or an arrow
where the chart ends before it. A bar without ends would look like an axis.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, nan

from hpcfed.analysis.render.charts.drawing import (
    Axis,
    Drawing,
    Spec,
    chart,
    ends_of,
    layer,
    reference,
    series_colour,
    short,
    tips,
)

CAP = 7
"""Length of the short line at an end."""
ARROWS = {
    "x": ("triangle-left", "triangle-right"),
    "y": ("triangle-down", "triangle-up"),
}
ARROW = 45
"""Size of an arrow."""


def whiskers(
    names: Sequence[str],
    along: str,
    measure: Spec,
    place: Spec,
    *,
    prefix: str = "",
    down: int = 0,
) -> list[Spec]:
    """Draw the intervals between the fields `low` and `high` along x or y.

    `measure` is the encoding along it, `place` are all others: position and colour.
    `prefix` is that of the two fields, and `down` moves all marks down by pixels.
    """
    low, high = f"{prefix}low", f"{prefix}high"
    moved = {"yOffset": down} if down else {}
    bar = {**place, along: {**measure, "field": low}, f"{along}2": {"field": high}}
    shown: Spec = {"names": names, "known": low, **moved}
    layers = [layer("rule", bar, size=1.5, clip=True, **shown)]
    tick: Spec = {"orient": "vertical" if along == "x" else "horizontal", "clip": True}
    for end in (low, high):
        at = {**place, along: {**measure, "field": end}}
        layers.append(layer("tick", at, size=CAP, thickness=1.5, **tick, **shown))
    # Arrows where intervals continue beyond the axis, if it does not follow them.
    unplaced = {key: value for key, value in measure.items() if key != "field"}
    edges = measure["scale"].get("domain", (None, None))
    for end, edge, sign, shape in zip(
        (low, high), edges, "<>", ARROWS[along], strict=True
    ):
        if edge is not None:
            at = {**place, along: {**unplaced, "datum": edge}}
            arrow = layer("point", at, shape=shape, filled=True, size=ARROW, **shown)
            arrow["transform"].append({"filter": f"datum.{end} {sign} {edge}"})
            layers.append(arrow)
    return layers


def _domain(
    axis: Axis, values: Sequence[float], ends: Sequence[float], *, margin: float = 0.0
) -> list[float | None]:
    """Return the ends of an axis. It follows the ends of intervals beyond the values
    only by the values' own range, since the intervals of few runs would squeeze
    everything else. The margin at both ends is a share of the axis.
    """
    least, most = min(values), max(values)
    # One value alone has no spread: its size stands in for it.
    reach = (most - least) or abs(most) or 1.0
    low = max(min([*ends, *values]), least - reach)
    high = min(max([*ends, *values]), most + reach)
    if axis.log:
        return [short(max(low, least / 2)), short(high)]
    room = margin * ((high - low) or reach)
    return [0 if axis.zero else short(low - room), short(high + room)]


# Rows: a row for each name, with a point for each series.

ROW = 16
"""Height of one point; the points of a row are below each other."""
VERDICT_ROW = 24
"""Height of a row with a single point."""
HIGH_ROW = 36
"""Height of a single point with its name above it."""
BESIDE = 32
"""Longest names beside their points, in characters; longer ones are above them."""


@dataclass(frozen=True)
class Mark:
    row: str
    value: float
    series: str = ""
    """Determines its colour."""
    low: float = nan
    """The lower end of the confidence interval; NaN without one."""
    high: float = nan


def rows(
    title: str,
    every: Sequence[Mark],
    x: Axis,
    *,
    line: float | None = None,
    order: Sequence[str] = (),
) -> Drawing:
    """Draw a row of points for each name, in the given order.

    With a dashed vertical `line`, each row has a single point, whose series is its
    verdict. `order` lists all series in the order of their colours.
    """
    shown = [mark for mark in every if x.shows(mark.value)]
    found = list(dict.fromkeys(mark.series for mark in shown))
    names = [name for name in order if name in found] or found
    named = list(dict.fromkeys(mark.row for mark in shown))
    values = [mark.value for mark in shown] + ([] if line is None else [line])
    across = x.encoding("x")
    if values:
        ends = [end for mark in shown for end in (mark.low, mark.high) if x.shows(end)]
        domain = _domain(x, values, ends, margin=0.05)
        across["scale"] |= {"domain": domain, "nice": False}
    # In the order of the data.
    row: Spec = {"field": "name", "type": "ordinal", "title": None, "sort": None}
    beside = max(map(len, named), default=0) <= BESIDE
    row["axis"] = {"labelLimit": 240, "ticks": False} if beside else None
    colour = series_colour(order or names, shown=names if order else None)
    place: Spec = {"y": row, "color": colour}
    each = VERDICT_ROW if beside else HIGH_ROW
    up = 8
    if line is None:
        # Intervals of one row would hide each other.
        place["yOffset"] = {"field": "series", "type": "nominal", "sort": names}
        each = ROW * (len(names) + (1 if beside else 2))
        # These offsets replace the one below, so only the names can make room.
        up = each // 2 - 8
    down = 0 if beside else 8
    told = {"name": "title", "series": "points" if line is None else "verdict"}
    measured = {"x": x.label, "low": "95 % from", "high": "to"}
    point: Spec = {**place, "x": across, "tooltip": tips(told, measured)}
    if line is None:
        point["shape"] = colour
    size: Spec = {"filled": True, "size": 50, "yOffset": down}
    # First, so that points are drawn over their intervals.
    layers = whiskers(names, "x", across, place, down=down)
    layers.append(layer("point", point, names=names, zoom=(), **size))
    if line is not None:
        at = layer("rule", {"x": across}, data=[{"x": line}], style="ideal")
        layers.insert(0, at)
    if not beside:
        layers.append(names_above(row, "name", -up))
    data = []
    for mark in shown:
        record = {"name": mark.row, "x": short(mark.value), "series": mark.series}
        data.append(record | ends_of(mark.low, mark.high))
    height = max(90 if line is None else each, each * len(named))
    return Drawing(title, chart(f"{x.label} by name", data, layers, height))


def names_above(row: Spec, field: str, up: int) -> Spec:
    """Write the name of each row above its marks, once."""
    text = {"y": row, "x": {"value": 2}, "text": {"field": field, "type": "nominal"}}
    written = layer("text", text, style="bar-name", dy=up, limit=520)
    written["transform"] = [{"aggregate": [{"op": "count"}], "groupby": [field]}]
    return written


# Points over two axes, and the steps of a frontier.


@dataclass(frozen=True)
class ScatterPoint:
    x: float
    y: float
    name: str = ""
    """Shown in the tooltip."""
    series: str = ""
    """Determines its colour and marker."""
    label: str = ""
    """Written beside it; short."""
    x_ends: tuple[float, float] = (nan, nan)
    """The interval of x; NaN without one."""
    y_ends: tuple[float, float] = (nan, nan)


Corners = Sequence[tuple[float, float]]


def scatter(
    title: str,
    points: Sequence[ScatterPoint],
    x: Axis,
    y: Axis,
    *,
    frontier: Corners = (),
    diagonal: str = "",
    roofs: Sequence[tuple[str, Corners]] = (),
) -> Drawing:
    """Draw points over both axes.

    `frontier` are the corners of steps, by increasing x. `diagonal` names a dashed line
    on which y equals x. `roofs` are dashed lines above the points, with their names.
    """
    shown = [point for point in points if x.shows(point.x) and y.shows(point.y)]
    names = [point.series for point in shown]
    where = {"x": x.encoding("x"), "y": y.encoding("y")}
    where["x"]["scale"]["nice"] = False  # the axis ends with the points
    colour = series_colour(names)
    layers: list[Spec] = []
    for along, axis, values, ends in (
        ("x", x, [one.x for one in shown], [one.x_ends for one in shown]),
        ("y", y, [one.y for one in shown], [one.y_ends for one in shown]),
    ):
        scale = where[along]["scale"]
        scale["padding"] = 8  # a margin for the markers at the edges
        known = [end for both in ends for end in both if isfinite(end)]
        if known and not axis.log:
            scale |= {"domain": _domain(axis, values, known), "nice": False}
        if known:
            place = {**where, "color": colour}
            layers += whiskers(
                names, along, place.pop(along), place, prefix=f"{along}_"
            )
    told = tips({"name": "title"}, {"x": x.label, "y": y.label})
    point = {**where, "color": colour, "shape": colour, "tooltip": told}
    size: Spec = {"filled": True, "size": 55, "clip": True}
    layers.append(layer("point", point, names=names, zoom=("x", "y"), **size))
    if any(one.label for one in shown):
        text = where | {"text": {"field": "label", "type": "nominal"}}
        # Drawn twice: the text has a rim in the page's colour, since points are near.
        for style in ("point-rim", "point-name"):
            layers.append(layer("text", text, names=names, style=style, clip=True))
    if frontier:
        layers += reference(_records(frontier), where, interpolate="step-after")
    if diagonal and shown:
        both = [value for one in shown for value in (one.x, one.y)]
        corners = _records([(end, end) for end in (min(both), max(both))])
        layers += reference(corners, where, name=diagonal)
    for name, roof in roofs:
        layers += reference(_records(roof), where, name=name, below=True)
    data = []
    for one in shown:
        record = {"x": short(one.x), "y": short(one.y), "series": one.series}
        record |= ends_of(*one.x_ends, "x_") | ends_of(*one.y_ends, "y_")
        data.append(record | {"name": one.name or one.series, "label": one.label})
    return Drawing(title, chart(f"{y.label} over {x.label}", data, layers))


def _records(corners: Corners) -> list[Spec]:
    return [{"x": short(left), "y": short(top)} for left, top in corners]
