"""What the marks of all charts share: numbers, colours of series, tooltips, and
reactions to clicks.
"""

from collections.abc import Mapping, Sequence
from math import isfinite

from hpcfed.analysis.render.charts.drawing import NUMBERS, Spec

LEGEND_LETTERS = 56
"""Total length of names that fit side by side in a legend, in characters."""
SYMBOL_LETTERS = 8
"""Width of a symbol and the gap to the next, in characters, also on paper."""
ZOOM = "wheel![event.ctrlKey || event.metaKey || event.altKey]"
"""A plain turn of the wheel scrolls the page."""


def short(value: float) -> float | None:
    """Round a number to five digits, to keep pages small; None if it is not finite."""
    if not isfinite(value):
        return None
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded == int(rounded) else rounded


def series_colour(names: Sequence[str], *, shown: Sequence[str] | None = None) -> Spec:
    """Colour marks by the field `series`. A name keeps its colour even if the legend
    shows only some names.
    """
    listed = list(dict.fromkeys(names if shown is None else shown))
    longest = max(map(len, listed), default=1)
    legend: Spec | None = {
        "columns": max(1, LEGEND_LETTERS // (longest + SYMBOL_LETTERS))
    }
    # A single series needs no legend: the title or the axis names it.
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
    """Make marks interactive: show the series chosen in the legend, and of these the
    marks whose field `known` has a value.

    Only one layer of a chart has `zoom`. It makes the legend clickable, and lets the
    mouse zoom and pan along these axes.
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
    """Return the fields of a tooltip with their titles. A name whose title is `title`
    is shown above the rest.
    """
    told: list[Spec] = []
    for field, title in names.items():
        told.append({"field": field, "type": "nominal", "title": title})
    for field, title in numbers.items():
        number = {"type": "quantitative", "format": NUMBERS}
        told.append({"field": field, "title": title, **number})
    return told
