"""What marks of all charts share: numbers, colours of series, tooltips, and what a click
does.
"""

from collections.abc import Mapping, Sequence
from math import isfinite

from hpcfed.analysis.render.charts.drawing import NUMBERS, Spec

LEGEND_LETTERS = 56
"""Letters of a legend that fit beside each other under a chart."""
SYMBOL_LETTERS = 8
"""Letters that a symbol and the gap to the next take, on paper too."""
ZOOM = "wheel![event.ctrlKey || event.metaKey || event.altKey]"
"""Plain turns of the wheel belong to the page."""


def short(value: float) -> float | None:
    """Round a number to five digits, which keeps pages small; None if it is not finite."""
    if not isfinite(value):
        return None
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded == int(rounded) else rounded


def series_colour(names: Sequence[str], *, shown: Sequence[str] | None = None) -> Spec:
    """Colour marks by the field `series`. A name keeps its colour where only some are
    shown in the legend.
    """
    listed = list(dict.fromkeys(names if shown is None else shown))
    longest = max(map(len, listed), default=1)
    legend: Spec | None = {
        "columns": max(1, LEGEND_LETTERS // (longest + SYMBOL_LETTERS))
    }
    # What is alone needs no name, which the title or the axis has.
    if len(listed) < 2:
        legend = None
    elif shown is not None:
        legend = {**(legend or {}), "values": listed}
    return {
        "field": "series",
        "type": "nominal",
        "title": None,
        "scale": {"domain": list(dict.fromkeys(names))},
        "legend": legend,
    }


def interactive(
    names: Sequence[str], *, zoom: Sequence[str] | None = None, known: str = ""
) -> Spec:
    """Let marks follow clicks: show the series that the legend chooses, and of these
    the marks whose field `known` has a value.

    A single layer of a chart has `zoom`. It makes the legend choose, and lets the mouse
    zoom and pan along these axes.
    """
    several = len(set(names)) > 1
    shown: list[Spec] = [{"filter": {"param": "chosen"}}] if several else []
    if known:
        shown.append({"filter": f"isValid(datum.{known})"})
    if zoom is None:
        return {"transform": shown}
    params: list[Spec] = []
    if several:
        select: Spec = {"type": "point", "fields": ["series"]}
        params.append({"name": "chosen", "select": select, "bind": "legend"})
    if zoom:
        select = {"type": "interval", "zoom": ZOOM, "encodings": list(zoom)}
        params.append({"name": "zoom", "select": select, "bind": "scales"})
    return {"transform": shown, "params": params}


def tips(names: Mapping[str, str], numbers: Mapping[str, str]) -> list[Spec]:
    """Return what a tooltip tells: fields with their titles. A name whose title is
    `title` stands above the rest.
    """
    told: list[Spec] = []
    for field, title in names.items():
        told.append({"field": field, "type": "nominal", "title": title})
    for field, title in numbers.items():
        number = {"type": "quantitative", "format": NUMBERS}
        told.append({"field": field, "title": title, **number})
    return told
