"""Timelines: what each of several rows did when."""

from collections.abc import Sequence
from dataclasses import dataclass

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

ROW = 26
"""Height of a row."""


@dataclass(frozen=True)
class Stretch:
    row: str
    """Such as a rank."""
    start: float
    end: float
    series: str
    """What it did, which gives the colour."""


def timeline(
    title: str, stretches: Sequence[Stretch], x: Axis, *, names: Sequence[str] = ()
) -> Drawing:
    """Draw stretches of time in their rows. `names` fixes the order of the colours."""
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
    across["scale"]["nice"] = False  # the axis ends with the last stretch
    layer = {
        "transform": chosen(shown),
        "params": clicks(shown, zoom=["x"]),
        "mark": {"type": "bar", "clip": True},
        "encoding": {
            "x": across,
            "x2": {"field": "x2"},
            "y": {"field": "row", "type": "nominal", "sort": None, "title": None},
            "color": series_colour(names or shown, shown=shown),
            "tooltip": [
                tip_name("row"),
                tip_name("series", "phase"),
                tip("took", x.label),
            ],
        },
    }
    spec = chart(f"{x.label} by row", data, [layer])
    spec["height"] = ROW * len(rows)
    return Drawing(title, spec, dense=len(data) > 1000)
