"""Charts of lines, with intervals as bands or bars, and of stacked areas."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite

from hpcfed.analysis.render.charts.drawing import (
    Axis,
    Drawing,
    Record,
    Spec,
    chart,
    ends_of,
    layer,
    reference,
    series_colour,
    short,
    tips,
)
from hpcfed.analysis.render.charts.points import whiskers

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
    def ends(self) -> list[float]:
        """The known ends of its intervals."""
        return [end for end in (*self.low, *self.high) if isfinite(end)]

    @property
    def near_ends(self) -> list[float]:
        """Ends of intervals, as far as an axis follows them: those of few runs would
        squeeze everything else.
        """
        known = [value for value in self.y if isfinite(value)]
        if not known:
            return []
        least, most = min(known) / MOST_REACH, max(known) * MOST_REACH
        return [min(max(end, least), most) for end in self.ends]

    def records(self, x: Axis, y: Axis) -> list[Record]:
        """Return the points that both axes show, with their intervals."""
        records = []
        for number, (across, up) in enumerate(zip(self.x, self.y, strict=True)):
            if not (x.shows(across) and y.shows(up)):
                continue
            record: Record = {"series": self.name, "x": short(across), "y": short(up)}
            # A line without intervals has no ends.
            ends = (self.low[number], self.high[number]) if self.low else ()
            if ends and all(y.shows(end) for end in ends):
                record |= ends_of(*ends)
            records.append(record)
        return records


def lines(title: str, every: Sequence[Line], x: Axis, y: Axis) -> Drawing:
    """Draw lines with their intervals over both axes."""
    coloured = [line for line in every if not line.ideal]
    names = [line.name for line in coloured]
    across = x.over(at for line in every for at in line.x).encoding("x")
    # A margin for the markers at both ends.
    across["scale"] |= {"padding": 6, "nice": False}
    where = {"x": across, "y": y.encoding("y")}
    if any(set(line.ends) - set(line.near_ends) for line in every):
        where["y"]["scale"]["domain"] = _domain(every, y)
    place = {**where, "color": series_colour(names)}
    # First, so that lines are drawn over their intervals.
    layers = _intervals(coloured, place)
    layers.append(layer("line", place, names=names, zoom=("x", "y"), clip=True))
    layers.append(_points(coloured, x, y, place))
    highest = max((max(line.y) for line in every if line.y), default=0.0)
    for line in every:
        if line.ideal:
            below = min(line.y) == highest
            layers += reference(line.records(x, y), where, name=line.name, below=below)
    data = [record for line in coloured for record in line.records(x, y)]
    return Drawing(title, chart(f"{y.label} over {x.label}", data, layers))


def _domain(every: Sequence[Line], y: Axis) -> list[float | None]:
    """End the axis before the ends of intervals that are far away."""
    shown: list[float] = []
    for line in every:
        shown += [value for value in (*line.y, *line.near_ends) if y.shows(value)]
    return [short(0.0 if y.zero else min(shown)), short(max(shown))]


def _intervals(every: Sequence[Line], place: Spec) -> list[Spec]:
    """Draw intervals below the lines: a band for curves, otherwise a bar per point."""
    # For single runs, all ends are NaN.
    if not any(map(isfinite, (end for line in every for end in line.low))):
        return []
    names = [line.name for line in every]
    if not any(line.band for line in every):
        others = {key: value for key, value in place.items() if key != "y"}
        return whiskers(names, "y", place["y"], others)
    band = {**place, "y": {**place["y"], "field": "low"}, "y2": {"field": "high"}}
    return [layer("area", band, names=names, known="low", opacity=0.18, clip=True)]


def _points(every: Sequence[Line], x: Axis, y: Axis, place: Spec) -> Spec:
    """Draw markers; if there are many points, hide them but keep their tooltips."""
    names = [line.name for line in every]
    told = {"x": x.label, "y": y.label}
    for line in every[:1]:
        if any(map(isfinite, line.low)):
            told |= {"low": f"{line.interval} from", "high": "to"}
    encoding = {**place, "tooltip": tips({"series": "title"}, told)}
    mark: Spec = {"filled": True, "size": 90, "clip": True, "opacity": 0}
    if max((len(line.x) for line in every), default=0) <= MOST_MARKERS:
        # Lines also differ in markers, for readers who cannot distinguish colours.
        encoding["shape"] = place["color"]
        mark = {"filled": True, "size": 40, "clip": True}
    return layer("point", encoding, names=names, **mark)


# Areas: how shares of a whole change.


def areas(
    title: str,
    across: Sequence[float],
    segments: Mapping[str, Sequence[float]],
    x: Axis,
    y: Axis,
) -> Drawing:
    """Draw the values of all segments over x, stacked."""
    shown = [name for name, values in segments.items() if max(values, default=0.0) > 0]
    edges = _edges(across)
    data: list[Record] = []
    for order, name in enumerate(shown):
        # A step ends where the next one begins; the last one ends at the last edge.
        values = [*segments[name], segments[name][-1]]
        for at, value in zip(edges, values, strict=True):
            record = {"x": short(at), "y": short(value), "series": name}
            data.append(record | {"order": order})
    measured = x.over(across).encoding("x")
    measured["scale"] |= {"nice": False, "domain": [edges[0], edges[-1]]}
    encoding = {
        "x": measured,
        "y": y.encoding("y") | {"stack": "zero"},
        "color": series_colour(list(segments), shown=shown),
        "order": {"field": "order", "type": "ordinal"},
        "tooltip": tips({"series": "title"}, {"x": x.label, "y": y.label}),
    }
    steps: Spec = {"clip": True, "interpolate": "step-after"}
    drawn = layer("area", encoding, names=shown, zoom=("x", "y"), **steps)
    return Drawing(title, chart(f"{y.label} over {x.label}", data, [drawn]))


def _edges(across: Sequence[float]) -> list[float]:
    """Return the edges of columns: midway between two places, and the same distance
    beyond the first and the last.
    """
    if len(across) < 2:
        return [at + half for at in across for half in (-0.5, 0.5)]
    middles = [(one + other) / 2 for one, other in pairwise(across)]
    # The outer steps are as wide on both sides of their point.
    return [2 * across[0] - middles[0], *middles, 2 * across[-1] - middles[-1]]
