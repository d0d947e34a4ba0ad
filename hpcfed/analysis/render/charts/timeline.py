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
class Span:
    row: str
    """Such as a rank."""
    start: float
    end: float
    series: str
    """What it did, which gives the colour."""


def timeline(
    title: str, spans: Sequence[Span], x: Axis, *, names: Sequence[str] = ()
) -> Drawing:
    """Draw spans of time in their rows. `names` fixes the order of the colours."""
    rows = list(dict.fromkeys(span.row for span in spans))
    shown = list(dict.fromkeys(span.series for span in spans))
    data: list[Record] = []
    for span in spans:
        took = short(span.end - span.start)
        record = {"row": span.row, "x": short(span.start), "x2": short(span.end)}
        data.append(record | {"series": span.series, "took": took})
    across = x.encoding("x")
    across["scale"]["nice"] = False  # the axis ends with the last span
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
