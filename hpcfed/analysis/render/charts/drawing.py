"""The parts of all charts: drawings, their axes and layers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, isfinite
from typing import Any

Spec = dict[str, Any]
"""A Vega-Lite description."""
Record = dict[str, Any]
"""A row of data, by field name."""

HEIGHT = 260
"""Pixels, without title and legend."""
NUMBERS = ",.6~g"
"""Number format of axes and tooltips: up to six digits, without trailing zeros."""
FEW_TICKS = 12
"""Up to this number of whole numbers, each has a tick."""


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
    zero: bool = False
    """Whether the axis begins at zero."""
    whole: bool = False
    """Whether only whole numbers are meaningful."""
    most: float | None = None
    """The end of the axis, even if values lie beyond."""

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
        if self.ticks:
            axis["values"] = list(self.ticks)
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


def chart(description: str, data: Sequence[Record], layers: Sequence[Spec]) -> Spec:
    """Overlay layers that share their data."""
    return {
        # Read by screen readers.
        "description": description,
        "data": {"values": list(data)},
        "height": HEIGHT,
        "layer": list(layers),
    }


def spread(values: Sequence[float]) -> float:
    """Return the ratio of the largest to the smallest value, to choose a scale."""
    positive = [value for value in values if isfinite(value) and value > 0]
    if not positive:
        return 1.0
    return max(positive) / min(positive)
