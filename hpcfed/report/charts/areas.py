"""Charts of areas upon each other: how shares of a whole change."""

from collections.abc import Mapping, Sequence

from hpcfed.report.charts.drawing import (
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


def areas(
    title: str,
    across: Sequence[float],
    segments: Mapping[str, Sequence[float]],
    x: Axis,
    y: Axis,
) -> Drawing:
    """Draw every segment's values over x, upon each other."""
    names = list(segments)
    shown = [name for name in names if max(segments[name], default=0.0) > 0]
    data: list[Record] = []
    for order, name in enumerate(shown):
        for at, value in zip(across, segments[name], strict=True):
            record = {"x": short(at), "y": short(value), "series": name}
            data.append(record | {"order": order})
    across_axis = x.over(across).encoding("x")
    across_axis["scale"]["nice"] = False
    layer = {
        "transform": chosen(shown),
        "params": clicks(shown),
        "mark": {"type": "area", "clip": True, "interpolate": "step"},
        "encoding": {
            "x": across_axis,
            "y": y.encoding("y") | {"stack": "zero"},
            "color": series_colour(names, shown=shown),
            "order": {"field": "order", "type": "ordinal"},
            "tooltip": [tip_name(), tip("x", x.label), tip("y", y.label)],
        },
    }
    return Drawing(title, chart(f"{y.label} over {x.label}", data, [layer]))
