"""Charts of estimates below each other, with their intervals, beside a line to compare
with: which of them differ from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from hpcfed.analysis.render.charts.drawing import (
    Axis,
    Drawing,
    Record,
    Spec,
    chart,
    chosen,
    clicks,
    series_colour,
    short,
    tip,
    tip_name,
)
from hpcfed.analysis.render.charts.whiskers import whiskers

ROW = 24
"""Height of a dot with its name beside it."""
HIGH_ROW = 36
"""Height of a dot with its name over it."""
BESIDE = 32
"""Letters of names that stand beside their dots; longer ones stand over them."""
MOST_REACH = 2.0
"""How many times the distance of dots an axis follows the ends of their intervals."""


@dataclass(frozen=True)
class Dot:
    name: str
    """Different from all others."""
    centre: float
    low: float
    """NaN where there is no interval."""
    high: float
    series: str
    """What gives it its colour."""


def dots(
    title: str, every: Sequence[Dot], x: Axis, *, line: float, order: Sequence[str]
) -> Drawing:
    """Draw a dot and its interval in a row for every estimate, and a dashed upright line.
    `order` are the series in the order of their colours.
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
    """Return what the axis spans: all dots and the line, and ends of intervals unless
    they are far away and would press everything else together.
    """
    centres = [line, *(dot.centre for dot in shown)]
    least, most = min(centres), max(centres)
    reach = MOST_REACH * (most - least)
    ends = [end for dot in shown for end in (dot.low, dot.high) if isfinite(end)]
    if reach:
        ends = [min(max(end, least - reach), most + reach) for end in ends]
    low, high = min(least, *ends, least), max(most, *ends, most)
    # Room for the dots at the edges; something to see where all is equal.
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
    tips = [tip_name("name"), tip("x", x.label), tip("low", "95 % from")]
    return {
        "transform": chosen(names),
        "params": clicks(names, zoom=()),
        "mark": {"type": "point", "filled": True, "size": 60, "yOffset": down},
        "encoding": {
            "x": across,
            "y": row,
            "color": colour,
            "tooltip": [*tips, tip("high", "to"), tip_name("series", "verdict")],
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
