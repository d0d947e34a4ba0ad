"""Intervals as bars with an end each: a short line where the interval ends, an arrow where
the chart does before it. A bar without ends would look like an axis.
"""

from collections.abc import Sequence
from typing import Literal

from hpcfed.analysis.render.charts.drawing import Spec, chosen

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

    `measure` is the encoding along it, `place` all others: where it stands, its colour.
    `domain` are the ends of the axis, where these are not those of the data. `mark` are
    further properties of all marks.
    """
    known = [*chosen(names), {"filter": f"isValid(datum.{low})"}]
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
    """Point to where intervals go on beyond the chart."""
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
