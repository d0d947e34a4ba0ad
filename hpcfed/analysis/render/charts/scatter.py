"""Charts of points with their names, and the steps of a frontier."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan

from hpcfed.analysis.render.charts.drawing import Axis, Drawing, Record, Spec, chart
from hpcfed.analysis.render.charts.intervals import Along, whiskers
from hpcfed.analysis.render.charts.marks import interactive, series_colour, short, tips


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


def scatter(
    title: str,
    points: Sequence[ScatterPoint],
    x: Axis,
    y: Axis,
    *,
    frontier: Sequence[tuple[float, float]] = (),
    diagonal: str = "",
    roofs: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> Drawing:
    """Draw points over both axes.

    `frontier` are the corners of steps, by increasing x. `diagonal` names a dashed line
    on which y equals x. `roofs` are dashed lines above the points, by name.
    """
    shown = [point for point in points if x.shows(point.x) and y.shows(point.y)]
    names = [point.series for point in shown]
    data = [_record(point) for point in shown]
    across, up = x.encoding("x"), y.encoding("y")
    # A margin for the markers at the edges.
    for encoding in (across, up):
        encoding["scale"]["padding"] = 8
    across["scale"]["nice"] = False  # the axis ends with the points
    # The axes follow the points, because intervals of few runs would squeeze them.
    for encoding, axis, values in (
        (across, x, [point.x for point in shown]),
        (up, y, [point.y for point in shown]),
    ):
        encoding["scale"] |= _domain(axis, values, _ends(shown, encoding["field"]))
    colour = series_colour(names)
    layers = [
        *_intervals(names, shown, "x", across, {"y": up, "color": colour}),
        *_intervals(names, shown, "y", up, {"x": across, "color": colour}),
        _points(names, x, y, across, up),
    ]
    if any(point.label for point in shown):
        # Drawn twice: the text has a rim in the page's colour, since points are near.
        for style in ("point-rim", "point-name"):
            layers.append(_labels(names, across, up, style))
    if frontier:
        corners = [{"x": short(left), "y": short(top)} for left, top in frontier]
        layers.append(_path(corners, across, up, interpolate="step-after"))
    if diagonal and shown:
        both = [value for point in shown for value in (point.x, point.y)]
        ends = [{"x": short(end), "y": short(end)} for end in (min(both), max(both))]
        layers.append(_path(ends, across, up))
        layers.append(_path_name(ends[-1] | {"series": diagonal}, across, up))
    for name, roof in (roofs or {}).items():
        ends = [{"x": short(left), "y": short(top)} for left, top in roof]
        layers.append(_path(ends, across, up))
        layers.append(_path_name(ends[-1] | {"series": name}, across, up, below=True))
    return Drawing(title, chart(f"{y.label} over {x.label}", data, layers))


def _record(point: ScatterPoint) -> Record:
    record: Record = {"x": short(point.x), "y": short(point.y), "series": point.series}
    for along, ends in (("x", point.x_ends), ("y", point.y_ends)):
        low, high = short(ends[0]), short(ends[1])
        if low is not None and high is not None:
            record |= {f"{along}_low": low, f"{along}_high": high}
    return record | {"name": point.name or point.series, "label": point.label}


def _ends(points: Sequence[ScatterPoint], along: str) -> list[float]:
    """Return the known ends of all intervals along a direction."""
    every = [point.x_ends if along == "x" else point.y_ends for point in points]
    return [end for ends in every for end in ends if isfinite(end)]


def _domain(axis: Axis, values: Sequence[float], ends: Sequence[float]) -> Spec:
    """Extend an axis beyond the points by at most the points' own range; return nothing
    if intervals do not matter.
    """
    if not values or not ends or axis.log:
        return {}
    least, most = min(values), max(values)
    reach = (most - least) or abs(most) or 1.0
    low = max(min(*ends, least), least - reach)
    high = min(max(*ends, most), most + reach)
    return {"domain": [0 if axis.zero else short(low), short(high)], "nice": False}


def _intervals(
    names: Sequence[str],
    points: Sequence[ScatterPoint],
    along: Along,
    measure: Spec,
    place: Spec,
) -> list[Spec]:
    if not _ends(points, along):
        return []
    return whiskers(
        names,
        along,
        measure,
        place,
        domain=measure["scale"].get("domain", ()),
        low=f"{along}_low",
        high=f"{along}_high",
    )


def _points(names: Sequence[str], x: Axis, y: Axis, across: Spec, up: Spec) -> Spec:
    colour = series_colour(names)
    return {
        **interactive(names, zoom=("x", "y")),
        "mark": {"type": "point", "filled": True, "size": 55, "clip": True},
        "encoding": {
            "x": across,
            "y": up,
            "color": colour,
            "shape": colour,
            "tooltip": tips({"name": "title"}, {"x": x.label, "y": y.label}),
        },
    }


def _labels(names: Sequence[str], across: Spec, up: Spec, style: str) -> Spec:
    text = {"text": {"field": "label", "type": "nominal"}}
    return {
        **interactive(names),
        "mark": {"type": "text", "style": style, "clip": True},
        "encoding": {"x": across, "y": up} | text,
    }


def _path(
    corners: Sequence[Record], across: Spec, up: Spec, *, interpolate: str = "linear"
) -> Spec:
    style = {"style": "ideal", "interpolate": interpolate, "clip": True}
    return {
        "data": {"values": list(corners)},
        "mark": {"type": "line", **style},
        "encoding": {"x": across, "y": up},
    }


def _path_name(end: Record, across: Spec, up: Spec, *, below: bool = False) -> Spec:
    text = {"text": {"field": "series", "type": "nominal"}}
    # A line that ends at the top has no space for its name above it.
    place = {"baseline": "top", "dy": 4} if below else {}
    return {
        "data": {"values": [end]},
        "mark": {"type": "text", "style": "ideal-name", **place},
        "encoding": {"x": across, "y": up} | text,
    }
