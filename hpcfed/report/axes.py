"""Axes of charts: their span, their ticks, and numbers as text."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor, isfinite, log10

MOST_TICKS = 7


@dataclass(frozen=True)
class Axis:
    label: str
    """With its unit."""
    log: bool = False
    ticks: Sequence[float] = ()
    """Where ticks must be; empty for round numbers."""
    zero: bool = False
    """Whether the axis begins at zero."""
    whole: bool = False
    """Whether only whole numbers have a meaning."""
    span: tuple[float, float] = field(default=(0.0, 1.0))

    def over(self, values: Iterable[float]) -> "Axis":
        """Return the axis with span and ticks that fit the values."""
        known = [value for value in values if self.shows(value)]
        # Without any value, an empty chart still has axes.
        low = min(known, default=1.0)
        high = max(known, default=10.0)
        widen = self._log_span if self.log else self._span
        span = widen(low, high)
        ticks = self.ticks or self._round_ticks(*span)
        return replace(self, ticks=ticks, span=span)

    def shows(self, value: float) -> bool:
        """Whether a value has a place on the axis."""
        if self.log and value <= 0:
            return False
        return isfinite(value)

    def _round_ticks(self, low: float, high: float) -> list[float]:
        if self.log:
            return _log_ticks(low, high)
        ticks = _ticks(low, high)
        if self.whole:
            return [tick for tick in ticks if tick == round(tick)]
        return ticks

    def _log_span(self, low: float, high: float) -> tuple[float, float]:
        # Wider where markers stand at the ends.
        factor = 1.15 if low == high or self.ticks else 1.05
        return low / factor, high * factor

    def _span(self, low: float, high: float) -> tuple[float, float]:
        if self.zero:
            low = 0.0
        # Where all values are the same, a span around them.
        width = high - low
        pad = 0.04 * width or 0.5 * abs(high) or 1.0
        if not self.zero:
            low -= pad
        return low, high + pad

    def fraction(self, value: float) -> float:
        """Return where a value is: 0 at the start of the axis, 1 at its end."""
        scale: Callable[[float], float] = log10 if self.log else float
        low = scale(self.span[0])
        high = scale(self.span[1])
        return (scale(value) - low) / (high - low)


def _log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2, 5, 10, …; fewer of a decade where that would be too many."""
    first = floor(log10(low))
    last = ceil(log10(high))
    # From the finest to the coarsest, until there are not too many.
    for steps in ((1, 2, 5), (1, 3), (1,)):
        marks = []
        for decade in range(first, last + 1):
            marks += [step * 10.0**decade for step in steps]
        marks = [mark for mark in marks if low <= mark <= high]
        if 2 <= len(marks) <= MOST_TICKS:
            return marks
    if len(marks) > MOST_TICKS:
        # More than seven decades: every second, third, … of them.
        return marks[:: ceil(len(marks) / MOST_TICKS)]
    return _ticks(low, high)  # within a decade


def _ticks(low: float, high: float) -> list[float]:
    """Return about five multiples of a round step."""
    least = (high - low) / 5
    # The step is the first round number from `least` on.
    size = 10.0 ** floor(log10(least))
    for factor in (1, 2, 2.5, 5, 10):  # the last is always large enough
        step = size * factor
        if step >= least:
            break
    first = ceil(low / step)
    # A tick at the very end must not be lost to rounding.
    last = floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def apart(ticks: Sequence[float], position: Callable[[float], float]) -> list[float]:
    """Return ticks whose numbers do not run into each other."""
    chosen = list(ticks[:1])
    for tick in ticks[1:]:
        previous = chosen[-1]
        letters = len(number_text(tick))
        letters += len(number_text(previous))
        distance = position(tick) - position(previous)
        # Half of both numbers' widths, at 7 pixels a letter, and a gap.
        if distance >= 3.5 * letters + 6:
            chosen.append(tick)
    return chosen


def number_text(value: float) -> str:
    """Return a short number, without an exponent where possible."""
    if value == 0:
        return "0"
    if not isfinite(value):
        return "?"
    # 1.5e6 instead of 1.5e+06
    if abs(value) >= 1e6:
        return f"{value:.3g}".replace("e+0", "e").replace("e+", "e")
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 1e-4:
        return f"{value:.3g}"
    return f"{value:.1e}".replace("e-0", "e-")


def spread(values: Sequence[float]) -> float:
    """Return the largest value by the smallest, to choose between scales."""
    positive = [value for value in values if isfinite(value) and value > 0]
    if not positive:
        return 1.0
    return max(positive) / min(positive)
