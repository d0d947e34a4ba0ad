"""Charts of stacked bars, upright or lying."""

from collections.abc import Mapping, Sequence

from hpcfed.analysis.render.charts.drawing import (
    NUMBERS,
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

STRIPE = 46
"""Height of a lying bar with its name."""
LEVEL_LETTERS = 48
"""Letters of all names that stand level under upright bars; longer names rise."""

Segments = Mapping[str, Sequence[float]]
"""By name, the value in every bar."""


def bars(
    title: str,
    categories: Sequence[str],
    segments: Segments,
    y: Axis,
    x_label: str,
) -> Drawing:
    """Draw an upright bar for every category, with all segments upon each other."""
    shown = _shown(segments)
    level = sum(map(len, categories)) <= LEVEL_LETTERS
    across = {
        "field": "x",
        "type": "ordinal",
        "title": x_label,
        "sort": None,
        "axis": {"labelAngle": 0 if level else -35},
    }
    layer = _layer(segments, shown, y, bar="x", length="y")
    layer["encoding"]["x"] = across
    spec = chart(f"{y.label} by {x_label}", _records(categories, shown), [layer])
    return Drawing(title, spec)


def stripes(
    title: str, categories: Sequence[str], segments: Segments, x: Axis
) -> Drawing:
    """Draw a lying bar for every category, under its name: for few bars that have long
    names.
    """
    shown = _shown(segments)
    where = {"field": "x", "type": "ordinal", "sort": None, "axis": None}
    layer = _layer(segments, shown, x, bar="y", length="x")
    layer["mark"] |= {"height": 15, "yOffset": 9}
    layer["encoding"]["y"] = where
    text: Spec = {
        "transform": [{"aggregate": [{"op": "count"}], "groupby": ["x"]}],
        "mark": {"type": "text", "style": "bar-name", "dy": -9, "limit": 520},
        "encoding": {
            "y": where,
            "x": {"value": 2},
            "text": {"field": "x", "type": "nominal"},
        },
    }
    data = _records(categories, shown)
    spec = chart(f"{x.label} by options", data, [layer, text])
    spec["height"] = STRIPE * max(1, len(set(categories)))
    return Drawing(title, spec)


def _shown(segments: Segments) -> Segments:
    """Return the segments that are above zero anywhere."""
    return {
        name: values
        for name, values in segments.items()
        if max(values, default=0.0) > 0
    }


def _records(categories: Sequence[str], segments: Segments) -> list[Record]:
    records = []
    for order, (name, values) in enumerate(segments.items()):
        for category, value in zip(categories, values, strict=True):
            record = {"x": category, "series": name, "y": short(value), "order": order}
            records.append(record)
    return records


def _layer(
    segments: Segments, shown: Segments, axis: Axis, *, bar: str, length: str
) -> Spec:
    """Return bars along one of the directions, still without their places."""
    names = list(segments)
    measure: Spec = {
        "field": "y",
        "type": "quantitative",
        "title": axis.label,
        "stack": "zero",
        "axis": {"format": NUMBERS},
    }
    # Names stand over lying bars; upright ones have theirs under the axis.
    tips = [tip_name("x"), tip_name("series", "what"), tip("y", axis.label)]
    if len(shown) == 1:
        del tips[1]
    return {
        "transform": chosen(list(shown)),
        "params": clicks(list(shown), zoom=()),
        "mark": {"type": "bar"},
        "encoding": {
            length: measure,
            "color": series_colour(names, shown=list(shown)),
            "order": {"field": "order", "type": "ordinal"},
            "tooltip": tips,
        },
    }
