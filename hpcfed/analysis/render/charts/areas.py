"""Charts of areas upon each other: how shares of a whole change."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

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
    edges = _edges(across)
    data: list[Record] = []
    for order, name in enumerate(shown):
        values = list(segments[name])
        # A step ends where the next one begins; the last one at the last edge.
        for at, value in zip(edges, [*values, values[-1]], strict=True):
            record = {"x": short(at), "y": short(value), "series": name}
            data.append(record | {"order": order})
    across_axis = x.over(across).encoding("x")
    across_axis["scale"] |= {"nice": False, "domain": [edges[0], edges[-1]]}
    layer = {
        "transform": chosen(shown),
        "params": clicks(shown),
        "mark": {"type": "area", "clip": True, "interpolate": "step-after"},
        "encoding": {
            "x": across_axis,
            "y": y.encoding("y") | {"stack": "zero"},
            "color": series_colour(names, shown=shown),
            "order": {"field": "order", "type": "ordinal"},
            "tooltip": [tip_name(), tip("x", x.label), tip("y", y.label)],
        },
    }
    return Drawing(title, chart(f"{y.label} over {x.label}", data, [layer]))


def _edges(across: Sequence[float]) -> list[float]:
    """Return where columns begin and end: in the middle between two places, and as far
    beyond the first and the last.
    """
    if len(across) < 2:
        return [at + half for at in across for half in (-0.5, 0.5)]
    middles = [(one + other) / 2 for one, other in pairwise(across)]
    first = 2 * across[0] - middles[0]
    last = 2 * across[-1] - middles[-1]
    return [first, *middles, last]
