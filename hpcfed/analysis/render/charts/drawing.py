"""The parts of all charts: drawings, axes, layers of marks, colours and tooltips."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, isfinite
from typing import Any

Spec = dict[str, Any]
"""A Vega-Lite description."""
Record = dict[str, Any]
"""A row of data, by field name."""

NUMBERS = ",.6~g"
"""Number format of axes and tooltips: up to six digits, without trailing zeros."""
FEW_TICKS = 12
"""Up to this number of whole numbers, each has a tick."""
LEGEND_LETTERS = 56
"""Total length of names that fit side by side in a legend, in characters."""
SYMBOL_LETTERS = 8
"""Width of a symbol and the gap to the next, in characters, also on paper."""
ZOOM = "wheel![event.ctrlKey || event.metaKey || event.altKey]"
"""A plain turn of the wheel scrolls the page."""


@dataclass(frozen=True)
class Drawing:
    title: str
    spec: Spec
    """Without width and colours, which the page or the paper adds."""
    dense: bool = False
    """Whether it has thousands of marks, for which a canvas is faster than SVG."""


@dataclass(frozen=True)
class Axis:
    label: str
    """With its unit."""
    log: bool = False
    ticks: Sequence[float] = ()
    """Positions of ticks; empty for round numbers."""
    below: Sequence[str] = ()
    """A second line of text below each of these ticks."""
    zero: bool = False
    """Whether the axis begins at zero."""
    whole: bool = False
    """Whether only whole numbers are meaningful."""
    most: float | None = None
    """The end of the axis, even if values lie beyond."""
    about: int = 0
    """Roughly how many ticks, in a low chart; 0: as many as usual."""

    def shows(self, value: float) -> bool:
        """Tell whether a value has a place on the axis."""
        if self.log and value <= 0:
            return False
        return isfinite(value)

    def over(self, values: Iterable[float]) -> "Axis":
        """Return the axis with a tick at each whole number, if there are few. Vega
        would add halves between them.
        """
        known = [value for value in values if self.shows(value)]
        if not (self.whole and known) or max(known) - min(known) > FEW_TICKS:
            return self
        numbers = range(floor(min(known)), ceil(max(known)) + 1)
        return replace(self, ticks=[float(number) for number in numbers])

    def encoding(self, field: str) -> Spec:
        """Position marks along this axis by a numeric field."""
        axis: Spec = {"format": NUMBERS}
        if self.about:
            axis["tickCount"] = self.about
        if self.ticks:
            axis["values"] = list(self.ticks)
        if self.below:
            names = [f"{tick:.10g}" for tick in self.ticks]
            texts = dict(zip(names, self.below, strict=True))
            # As JavaScript writes the numbers.
            axis["labelExpr"] = f"[datum.label, {json.dumps(texts)}[datum.value]]"
        if self.whole:
            axis["tickMinStep"] = 1
        scale: Spec = {"type": "log"} if self.log else {"zero": self.zero}
        # A log axis from 1 to 1000 would hide that all values lie between 90 and 110.
        scale["nice"] = not self.log
        if self.most is not None:
            scale |= {"domainMax": self.most, "nice": False}
        return {
            "field": field,
            "type": "quantitative",
            "title": self.label,
            "axis": axis,
            "scale": scale,
        }


def chart(
    description: str, data: Sequence[Record], layers: Sequence[Spec], height: int = 260
) -> Spec:
    """Overlay layers that share their data. The height, in pixels, is that without
    title and legend.
    """
    return {
        # Read by screen readers.
        "description": description,
        "data": {"values": list(data)},
        "height": height,
        "layer": list(layers),
    }


def layer(
    kind: str,
    encoding: Spec,
    *,
    names: Sequence[str] = (),
    zoom: Sequence[str] | None = None,
    known: str = "",
    data: Sequence[Record] | None = None,
    **properties: Any,
) -> Spec:
    """Return marks of a kind, such as `line`, with further properties of the mark.

    Of several `names` of series, the legend chooses which are shown; of these, only
    marks whose field `known` has a value. Only one layer of a chart has `zoom`. It
    makes the legend clickable, and lets the mouse zoom and pan along these axes.
    Marks with their own `data` do not react to the legend.
    """
    made: Spec = {"mark": {"type": kind, **properties}, "encoding": encoding}
    if data is not None:
        return made | {"data": {"values": list(data)}}
    # A single series has no legend, and Vega refuses a filter by a choice that no layer
    # offers.
    several = len(set(names)) > 1
    made["transform"] = [{"filter": {"param": "chosen"}}] if several else []
    # Vega would draw an unknown end at zero.
    if known:
        made["transform"].append({"filter": f"isValid(datum.{known})"})
    params: list[Spec] = []
    if several and zoom is not None:
        select: Spec = {"type": "point", "fields": ["series"]}
        params.append({"name": "chosen", "select": select, "bind": "legend"})
    if zoom:
        select = {"type": "interval", "zoom": ZOOM, "encodings": list(zoom)}
        params.append({"name": "zoom", "select": select, "bind": "scales"})
    return made | {"params": params}


def reference(
    corners: Sequence[Record],
    where: Spec,
    *,
    name: str = "",
    below: bool = False,
    interpolate: str = "linear",
) -> list[Spec]:
    """Draw a dashed line through corners, with its name at its end. A line that ends at
    the top has its name below, because there is no space above it.
    """
    shape: Spec = {"style": "ideal", "interpolate": interpolate, "clip": True}
    layers = [layer("line", where, data=corners, **shape)]
    if name:
        end = [corner | {"series": name} for corner in corners[-1:]]
        place: Spec = {"baseline": "top", "dy": 4} if below else {}
        text = where | {"text": {"field": "series", "type": "nominal"}}
        layers.append(layer("text", text, data=end, style="ideal-name", **place))
    return layers


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


def short(value: float) -> float | None:
    """Round a number to five digits, to keep pages small; None if it is not finite."""
    if not isfinite(value):
        return None
    # Five digits: a page of a thousand runs would double in size with seventeen.
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded == int(rounded) else rounded


def ends_of(low: float, high: float, prefix: str = "") -> Record:
    """Return the fields of an interval; none if it is unknown."""
    if not (isfinite(low) and isfinite(high)):
        return {}
    return {f"{prefix}low": short(low), f"{prefix}high": short(high)}


def spread(values: Sequence[float]) -> float:
    """Return the ratio of the largest to the smallest value, to choose a scale."""
    positive = [value for value in values if isfinite(value) and value > 0]
    return max(positive) / min(positive) if positive else 1.0
