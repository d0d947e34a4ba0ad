"""Charts of marks with their intervals: a row for each name, with a mark for each
series.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

from hpcfed.analysis.render.charts.drawing import (
    Axis,
    Drawing,
    Record,
    chart,
    chosen,
    clicks,
    series_colour,
    short,
    tip,
    tip_name,
)
from hpcfed.analysis.render.charts.whiskers import whiskers

ROW = 16
"""Height of a mark's place; those of one row stand below each other."""


@dataclass(frozen=True)
class Mark:
    row: str
    value: float
    series: str = ""
    low: float = nan
    """The lower end of the confidence interval; NaN where there is none."""
    high: float = nan


def rows(title: str, every: Sequence[Mark], x: Axis) -> Drawing:
    """Draw a row of marks for each name, in the order in which they come."""
    names = list(dict.fromkeys(mark.series for mark in every))
    named = list(dict.fromkeys(mark.row for mark in every))
    data = [_record(mark) for mark in every if x.shows(mark.value)]
    where = {"field": "x", "type": "nominal", "title": None, "sort": named}
    # Intervals of one row would hide each other.
    beside = {"field": "series", "type": "nominal", "sort": names}
    across = x.encoding("y")
    across["scale"] |= {"domain": _span(every, x), "nice": False}
    place = {"y": where, "yOffset": beside, "color": series_colour(names)}
    tips = [tip_name(), tip_name("x", "option"), tip("y", x.label)]
    tips += [tip("low", "95 % from"), tip("high", "to")]
    layers = [
        *whiskers(names, "x", across, place, domain=across["scale"]["domain"]),
        {
            "transform": chosen(names),
            "params": clicks(names, zoom=()),
            "mark": {"type": "point", "filled": True, "size": 45},
            "encoding": {
                **place,
                "x": across,
                "shape": series_colour(names),
                "tooltip": tips,
            },
        },
    ]
    spec = chart(f"{x.label} by option", data, layers)
    spec["height"] = max(90, ROW * len(named) * (len(names) + 1))
    return Drawing(title, spec)


def _span(every: Sequence[Mark], x: Axis) -> list[float | None]:
    """Return the ends of the axis: it follows intervals as far again as the marks are
    apart, since those of few runs would press everything else together.
    """
    values = [mark.value for mark in every if x.shows(mark.value)]
    ends = [end for mark in every for end in (mark.low, mark.high) if x.shows(end)]
    if not values:
        return [0, 1]
    least, most = min(values), max(values)
    reach = (most - least) or abs(most) or 1.0
    low = max(min([*ends, *values]), least - reach)
    high = min(max([*ends, *values]), most + reach)
    # Room for the marks at both ends.
    room = 0.04 * (high - low) or 0.1 * reach
    if x.log:
        return [short(max(low, least / 2)), short(high)]
    return [0 if x.zero else short(low - room), short(high + room)]


def _record(mark: Mark) -> Record:
    record = {"x": mark.row, "series": mark.series, "y": short(mark.value)}
    low, high = short(mark.low), short(mark.high)
    if low is not None and high is not None:
        record |= {"low": low, "high": high}
    return record
