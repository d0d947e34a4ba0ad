"""Charts of lines, with intervals as bands or bars, and of stacked areas."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite

from hpcfed.analysis.render.charts.drawing import Axis, Drawing, Record, Spec, chart
from hpcfed.analysis.render.charts.intervals import whiskers
from hpcfed.analysis.render.charts.marks import interactive, series_colour, short, tips

MOST_MARKERS = 24
"""Most markers on one line: more would hide it. The points still have tooltips."""
MOST_REACH = 2.5
"""An axis follows the ends of intervals up to this factor beyond the points."""


@dataclass(frozen=True)
class Line:
    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    """Lower ends of the confidence intervals; NaN without intervals."""
    high: Sequence[float] = ()
    """Their upper ends."""
    interval: str = "95 %"
    """The kind of the intervals, in a word."""
    band: bool = False
    """Whether intervals are a band, for curves with many points, instead of bars."""
    ideal: bool = False
    """Whether this is a dashed reference line without points."""

    @property
    def near_ends(self) -> list[float]:
        """Ends of intervals, as far as an axis follows them: those of few runs would
        squeeze everything else.
        """
        known = [value for value in self.y if isfinite(value)]
        if not known:
            return []
        least = min(known) / MOST_REACH
        most = max(known) * MOST_REACH
        ends = []
        for end in (*self.low, *self.high):
            if isfinite(end):
                ends.append(min(max(end, least), most))
        return ends


def lines(title: str, every: Sequence[Line], x: Axis, y: Axis) -> Drawing:
    """Draw lines with their intervals over both axes."""
    coloured = [line for line in every if not line.ideal]
    ideals = [line for line in every if line.ideal]
    names = [line.name for line in coloured]
    data: list[Record] = []
    for line in coloured:
        data += _records(line, x, y)
    up = _reach(y.encoding("y"), every, y)
    across = x.over(at for line in every for at in line.x).encoding("x")
    # A margin for the markers at both ends.
    across["scale"] |= {"padding": 6, "nice": False}
    layers = _intervals(coloured, across, up)
    layers.append(_curve(names, across, up))
    layers.append(_points(coloured, x, y, across, up))
    highest = max((max(line.y) for line in every if line.y), default=0.0)
    for line in ideals:
        # A horizontal line at the top has no space for its name above it.
        below = min(line.y) == highest
        layers += _ideal(line, x, y, across, up, below=below)
    spec = chart(f"{y.label} over {x.label}", data, layers)
    return Drawing(title, spec)


def _records(line: Line, x: Axis, y: Axis) -> list[Record]:
    """Return the points that both axes show, with their intervals."""
    records = []
    for number, (across, up) in enumerate(zip(line.x, line.y, strict=True)):
        if not (x.shows(across) and y.shows(up)):
            continue
        record: Record = {"series": line.name, "x": short(across), "y": short(up)}
        # A line without intervals has no ends.
        ends = (line.low[number], line.high[number]) if line.low else ()
        if ends and all(y.shows(end) for end in ends):
            record |= {"low": short(ends[0]), "high": short(ends[1])}
        records.append(record)
    return records


def _reach(up: Spec, every: Sequence[Line], y: Axis) -> Spec:
    """End the axis before the ends of intervals that are far away."""
    shown: list[float] = []
    beyond = False
    for line in every:
        shown += [value for value in (*line.y, *line.near_ends) if y.shows(value)]
        near = set(line.near_ends)
        ends = [end for end in (*line.low, *line.high) if isfinite(end)]
        beyond = beyond or any(end not in near for end in ends)
    if not beyond or not shown:
        return up
    low = 0.0 if y.zero else min(shown)
    return {**up, "scale": {**up["scale"], "domain": [short(low), short(max(shown))]}}


def _intervals(every: Sequence[Line], across: Spec, up: Spec) -> list[Spec]:
    """Draw intervals below the lines: a band for curves, otherwise a bar per point."""
    # For single runs, all ends are NaN.
    if not any(isfinite(end) for line in every for end in line.low):
        return []
    names = [line.name for line in every]
    colour = series_colour(names)
    if not any(line.band for line in every):
        ends = up["scale"].get("domain", ())
        place = {"x": across, "color": colour}
        return whiskers(names, "y", up, place, domain=ends)
    return [
        {
            **interactive(names, known="low"),
            "mark": {"type": "area", "opacity": 0.18, "clip": True},
            "encoding": {
                "x": across,
                "y": {**up, "field": "low"},
                "y2": {"field": "high"},
                "color": colour,
            },
        }
    ]


def _curve(names: Sequence[str], across: Spec, up: Spec) -> Spec:
    return {
        **interactive(names, zoom=("x", "y")),
        "mark": {"type": "line", "clip": True},
        "encoding": {"x": across, "y": up, "color": series_colour(names)},
    }


def _points(every: Sequence[Line], x: Axis, y: Axis, across: Spec, up: Spec) -> Spec:
    """Draw markers; if there are many points, hide them but keep their tooltips."""
    names = [line.name for line in every]
    longest = max((len(line.x) for line in every), default=0)
    few = longest <= MOST_MARKERS
    told = {"x": x.label, "y": y.label}
    for line in every[:1]:
        if any(map(isfinite, line.low)):
            told |= {"low": f"{line.interval} from", "high": "to"}
    encoding: Spec = {"x": across, "y": up, "color": series_colour(names)}
    encoding["tooltip"] = tips({"series": "title"}, told)
    if few:
        # Lines also differ in markers, for readers who cannot distinguish colours.
        encoding["shape"] = series_colour(names)
    mark: Spec = {"type": "point", "filled": True, "size": 40, "clip": True}
    if not few:
        mark |= {"size": 90, "opacity": 0}
    return {**interactive(names), "mark": mark, "encoding": encoding}


def _ideal(
    line: Line, x: Axis, y: Axis, across: Spec, up: Spec, *, below: bool
) -> list[Spec]:
    """Draw a dashed line with its name at its end."""
    data = _records(line, x, y)
    place = {"baseline": "top", "dy": 4} if below else {}
    where = {"x": across, "y": up}
    name = {"text": {"field": "series", "type": "nominal"}}
    return [
        {
            "data": {"values": data},
            "mark": {"type": "line", "style": "ideal", "clip": True},
            "encoding": where,
        },
        {
            "data": {"values": data[-1:]},
            "mark": {"type": "text", "style": "ideal-name", **place},
            "encoding": where | name,
        },
    ]


# Areas: how shares of a whole change.


def areas(
    title: str,
    across: Sequence[float],
    segments: Mapping[str, Sequence[float]],
    x: Axis,
    y: Axis,
) -> Drawing:
    """Draw the values of all segments over x, stacked."""
    names = list(segments)
    shown = [name for name in names if max(segments[name], default=0.0) > 0]
    edges = _edges(across)
    data: list[Record] = []
    for order, name in enumerate(shown):
        values = list(segments[name])
        # A step ends where the next one begins; the last one ends at the last edge.
        for at, value in zip(edges, [*values, values[-1]], strict=True):
            record = {"x": short(at), "y": short(value), "series": name}
            data.append(record | {"order": order})
    across_axis = x.over(across).encoding("x")
    across_axis["scale"] |= {"nice": False, "domain": [edges[0], edges[-1]]}
    layer = {
        **interactive(shown, zoom=("x", "y")),
        "mark": {"type": "area", "clip": True, "interpolate": "step-after"},
        "encoding": {
            "x": across_axis,
            "y": y.encoding("y") | {"stack": "zero"},
            "color": series_colour(names, shown=shown),
            "order": {"field": "order", "type": "ordinal"},
            "tooltip": tips({"series": "title"}, {"x": x.label, "y": y.label}),
        },
    }
    return Drawing(title, chart(f"{y.label} over {x.label}", data, [layer]))


def _edges(across: Sequence[float]) -> list[float]:
    """Return the edges of columns: midway between two places, and the same distance
    beyond the first and the last.
    """
    if len(across) < 2:
        return [at + half for at in across for half in (-0.5, 0.5)]
    middles = [(one + other) / 2 for one, other in pairwise(across)]
    first = 2 * across[0] - middles[0]
    last = 2 * across[-1] - middles[-1]
    return [first, *middles, last]
