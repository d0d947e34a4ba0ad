"""Charts of estimates with their intervals: dots beside a reference line, and rows of
marks.

An interval is a bar with two ends: a short line where the interval ends, or an arrow
where the chart ends before it. A bar without ends would look like an axis.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import Literal

from hpcfed.analysis.render.charts.drawing import Axis, Drawing, Record, Spec, chart
from hpcfed.analysis.render.charts.marks import interactive, series_colour, short, tips

Along = Literal["x", "y"]
CAP = 7
"""Length of the short line at an end."""
ARROW = 45
"""Size of an arrow."""
_ACROSS = {"x": "vertical", "y": "horizontal"}
_ARROWS: dict[tuple[Along, str], str] = {
    ("x", "low"): "triangle-left",
    ("x", "high"): "triangle-right",
    ("y", "low"): "triangle-down",
    ("y", "high"): "triangle-up",
}


def whiskers(
    names: Sequence[str],
    along: Along,
    measure: Spec,
    place: Spec,
    *,
    domain: Sequence[float | None] = (),
    low: str = "low",
    high: str = "high",
    mark: Spec | None = None,
) -> list[Spec]:
    """Draw the intervals between two fields along one direction.

    `measure` is the encoding along it, `place` are all others: position and colour.
    `domain` are the ends of the axis, if they are not those of the data. `mark` are
    further properties of all marks.
    """
    known = interactive(names, known=low)["transform"]
    extra = mark or {}
    bar: Spec = {
        "transform": known,
        "mark": {"type": "rule", "size": 1.5, "clip": True, **extra},
        "encoding": {
            **place,
            along: {**measure, "field": low},
            f"{along}2": {"field": high},
        },
    }
    layers = [bar]
    for end in (low, high):
        layers.append(
            {
                "transform": known,
                "mark": {
                    "type": "tick",
                    "orient": _ACROSS[along],
                    "size": CAP,
                    "thickness": 1.5,
                    "clip": True,
                    **extra,
                },
                "encoding": {**place, along: {**measure, "field": end}},
            }
        )
    if domain:
        layers += _arrows(known, along, measure, place, domain, (low, high), extra)
    return layers


def _arrows(
    known: list[Spec],
    along: Along,
    measure: Spec,
    place: Spec,
    domain: Sequence[float | None],
    ends: tuple[str, str],
    extra: Spec,
) -> list[Spec]:
    """Mark where intervals continue beyond the chart."""
    layers: list[Spec] = []
    for which, end, edge, sign in zip(
        ("low", "high"), ends, domain, ("<", ">"), strict=True
    ):
        if edge is None:
            continue
        cut = {"filter": f"datum.{end} {sign} {edge}"}
        at = {key: value for key, value in measure.items() if key != "field"}
        layers.append(
            {
                "transform": [*known, cut],
                "mark": {
                    "type": "point",
                    "shape": _ARROWS[along, which],
                    "filled": True,
                    "size": ARROW,
                    **extra,
                },
                "encoding": {**place, along: {**at, "datum": edge}},
            }
        )
    return layers


# Dots: which estimates differ from a reference line.

ROW = 24
"""Height of a dot with its name beside it."""
HIGH_ROW = 36
"""Height of a dot with its name above it."""
BESIDE = 32
"""Longest names beside their dots, in characters; longer ones are above them."""
MOST_REACH = 2.0
"""How far an axis follows the ends of intervals, as a multiple of the distance of the
dots.
"""


@dataclass(frozen=True)
class Dot:
    name: str
    """Unique among all dots."""
    centre: float
    low: float
    """NaN without an interval."""
    high: float
    series: str
    """Determines its colour."""


def dots(
    title: str, every: Sequence[Dot], x: Axis, *, line: float, order: Sequence[str]
) -> Drawing:
    """Draw a dot and its interval in a row for each estimate, and a dashed vertical
    line. `order` lists the series in the order of their colours.
    """
    shown = [dot for dot in every if x.shows(dot.centre)]
    names = [one for one in order if one in {dot.series for dot in shown}]
    across = x.encoding("x")
    across["scale"] |= {"domain": _domain(shown, line), "nice": False}
    beside = max((len(dot.name) for dot in shown), default=0) <= BESIDE
    row: Spec = {"field": "name", "type": "ordinal", "sort": None, "title": None}
    row["axis"] = {"labelLimit": 240, "ticks": False} if beside else None
    down = 0 if beside else 8
    colour = series_colour(order, shown=names)
    layers = [
        _line(line, across),
        *whiskers(
            names,
            "x",
            across,
            {"y": row, "color": colour},
            domain=across["scale"]["domain"],
            mark={"yOffset": down},
        ),
        _dots(names, colour, x, across, row, down),
    ]
    if not beside:
        layers.append(_names(row))
    data = [_record(dot) for dot in shown]
    spec = chart(f"{x.label} by name", data, layers)
    spec["height"] = (ROW if beside else HIGH_ROW) * max(1, len(shown))
    return Drawing(title, spec)


def _record(dot: Dot) -> Record:
    record: Record = {"name": dot.name, "x": short(dot.centre), "series": dot.series}
    if isfinite(dot.low) and isfinite(dot.high):
        record |= {"low": short(dot.low), "high": short(dot.high)}
    return record


def _domain(shown: Sequence[Dot], line: float) -> list[float | None]:
    """Return the range of the axis: all dots and the line, and the ends of intervals,
    unless they are so far away that they would squeeze everything else.
    """
    centres = [line, *(dot.centre for dot in shown)]
    least, most = min(centres), max(centres)
    reach = MOST_REACH * (most - least)
    ends = [end for dot in shown for end in (dot.low, dot.high) if isfinite(end)]
    if reach:
        ends = [min(max(end, least - reach), most + reach) for end in ends]
    low, high = min(least, *ends, least), max(most, *ends, most)
    # A margin for the dots at the edges, and a visible range if all values are equal.
    room = 0.06 * (high - low) or 0.01 * max(abs(line), 1.0)
    return [short(low - room), short(high + room)]


def _line(at: float, across: Spec) -> Spec:
    return {
        "data": {"values": [{"x": at}]},
        "mark": {"type": "rule", "style": "ideal"},
        "encoding": {"x": across},
    }


def _dots(
    names: Sequence[str], colour: Spec, x: Axis, across: Spec, row: Spec, down: int
) -> Spec:
    told = {"x": x.label, "low": "95 % from", "high": "to"}
    return {
        **interactive(names, zoom=()),
        "mark": {"type": "point", "filled": True, "size": 60, "yOffset": down},
        "encoding": {
            "x": across,
            "y": row,
            "color": colour,
            "tooltip": tips({"name": "title", "series": "verdict"}, told),
        },
    }


def _names(row: Spec) -> Spec:
    return {
        "mark": {"type": "text", "style": "bar-name", "dy": -8, "limit": 520},
        "encoding": {
            "y": row,
            "x": {"value": 2},
            "text": {"field": "name", "type": "nominal"},
        },
    }


# Rows of marks: a row for each name, with a mark for each series.

MARK_ROW = 16
"""Height of one mark; the marks of a row are below each other."""


@dataclass(frozen=True)
class Mark:
    row: str
    value: float
    series: str = ""
    low: float = nan
    """The lower end of the confidence interval; NaN without one."""
    high: float = nan


def rows(title: str, every: Sequence[Mark], x: Axis) -> Drawing:
    """Draw a row of marks for each name, in the given order."""
    names = list(dict.fromkeys(mark.series for mark in every))
    named = list(dict.fromkeys(mark.row for mark in every))
    data = [_mark_record(mark) for mark in every if x.shows(mark.value)]
    where = {"field": "x", "type": "nominal", "title": None, "sort": named}
    # Intervals of one row would hide each other.
    beside = {"field": "series", "type": "nominal", "sort": names}
    across = x.encoding("y")
    across["scale"] |= {"domain": _span(every, x), "nice": False}
    place = {"y": where, "yOffset": beside, "color": series_colour(names)}
    told = {"y": x.label, "low": "95 % from", "high": "to"}
    layers = [
        *whiskers(names, "x", across, place, domain=across["scale"]["domain"]),
        {
            **interactive(names, zoom=()),
            "mark": {"type": "point", "filled": True, "size": 45},
            "encoding": {
                **place,
                "x": across,
                "shape": series_colour(names),
                "tooltip": tips({"series": "title", "x": "option"}, told),
            },
        },
    ]
    spec = chart(f"{x.label} by option", data, layers)
    spec["height"] = max(90, MARK_ROW * len(named) * (len(names) + 1))
    return Drawing(title, spec)


def _span(every: Sequence[Mark], x: Axis) -> list[float | None]:
    """Return the ends of the axis. It follows intervals beyond the marks only by the
    marks' own range, since the intervals of few runs would squeeze everything else.
    """
    values = [mark.value for mark in every if x.shows(mark.value)]
    ends = [end for mark in every for end in (mark.low, mark.high) if x.shows(end)]
    if not values:
        return [0, 1]
    least, most = min(values), max(values)
    reach = (most - least) or abs(most) or 1.0
    low = max(min([*ends, *values]), least - reach)
    high = min(max([*ends, *values]), most + reach)
    # A margin for the marks at both ends.
    room = 0.04 * (high - low) or 0.1 * reach
    if x.log:
        return [short(max(low, least / 2)), short(high)]
    return [0 if x.zero else short(low - room), short(high + room)]


def _mark_record(mark: Mark) -> Record:
    record = {"x": mark.row, "series": mark.series, "y": short(mark.value)}
    low, high = short(mark.low), short(mark.high)
    if low is not None and high is not None:
        record |= {"low": low, "high": high}
    return record
