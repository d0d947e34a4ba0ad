"""How numbers become text: one function for every kind of figure that people read.

All rooms write their numbers with these functions, so a figure reads the same on a
terminal, on a page and in a log. An unknown figure is a dash.
"""

from collections.abc import Callable
from math import isfinite, isinf, isnan
from typing import Protocol

MIB = 2**20
DASH = "–"
MINUS = "−"

Write = Callable[[float], str]
"""Formats a number as text."""


class Interval(Protocol):
    """A figure with the ends of its confidence interval, which are NaN if unknown."""

    @property
    def centre(self) -> float: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...


def number(value: float) -> str:
    """Return three digits: `0.123`, `12.3`; whole thousands: `1,234`."""
    if isnan(value):
        return DASH
    if isinf(value):
        return "∞" if value > 0 else f"{MINUS}∞"
    # From here on, three digits would be `1e+03`.
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def times_as(told: str, what: str) -> str:
    """Return `1.5 times [1, 2] as long` for `1.5 times [1, 2]`, and `just as long [1, 1]`
    for `1 times [1, 1]`.
    """
    if told.startswith("1 times"):
        return f"just as {what}{told.removeprefix('1 times')}"
    return f"{told} as {what}"


def formatted(style: str, unit: str = "") -> Write:
    """Return a function that writes numbers in a format such as `,.0f`, with a unit."""

    def write(value: float) -> str:
        return DASH if isnan(value) else f"{value:{style}}{unit}"

    return write


def signed(value: float) -> str:
    """Return `+0.80` or `−0.80`: a difference."""
    return f"{value:+.2f}".replace("-", MINUS)


def ratio(value: float) -> str:
    """Return `1.120`: how many times as much."""
    # The same number of decimals at both ends of an interval: 1.000 says more than 1.
    return f"{value:.3f}" if value < 10 else number(value)


def interval(
    estimate: Interval, scale: float = 1.0, write: Write = number, unit: str = ""
) -> str:
    """Return `12.3 % [11.8, 12.9]`, or `12.3 %` if the interval is unknown."""
    text = f"{write(scale * estimate.centre)}{unit}"
    if isnan(estimate.low) or isnan(estimate.high):
        return text
    low, high = write(scale * estimate.low), write(scale * estimate.high)
    return f"{text} [{low}, {high}]"


def bytes_text(size: float) -> str:
    """Return a number of bytes in the largest unit that fits: `12.50 MiB`."""
    if isnan(size):
        return DASH
    if size < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.2f} {unit}"
    return f"{size / 1024:.2f} TiB"


def flops_text(operations: float) -> str:
    """Return floating-point operations in the largest unit that fits: `7.61 GFLOP`."""
    for unit, size in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9)):
        if operations >= 0.9995 * size:
            return f"{number(operations / size)} {unit}"
    return f"{operations / 1e9:.2g} GFLOP"


# Four ways to write a time, each for its own place: a clock for live displays, words
# for whole runs, one unit for prices, and seconds or ms for a round.


def duration(seconds: float) -> str:
    """Return a time as a clock shows it: `0:07`, `1:02:03` or `3 d 04:00`."""
    if not isfinite(seconds):
        return "?"
    whole = round(max(0.0, seconds))
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02}:{minute:02}"
    if hours:
        return f"{hour}:{minute:02}:{second:02}"
    return f"{minute}:{second:02}"


def time_text(seconds: float) -> str:
    """Return a time in words: `47.3 s`, `3 min 20 s`, `2 h 5 min` or `3 d 4 h`."""
    if not isfinite(seconds):
        return DASH
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, second = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {second} s"
    hours, minute = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minute} min"
    days, hour = divmod(hours, 24)
    return f"{days} d {hour} h"


def seconds_text(seconds: float) -> str:
    """Return a time in the unit that suits it, with three digits: `41.3 ms`."""
    # A time that rounds up to the next unit is written in that.
    if seconds < 0.9995e-3:
        return f"{1e6 * seconds:.3g} µs"
    if seconds < 0.9995:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 599.5:
        return f"{seconds:.3g} s"
    if seconds < 35_970:
        return f"{seconds / 60:.3g} min"
    return f"{number(seconds / 3600)} h"


def short_seconds(seconds: float) -> str:
    """Return the time of a round: `1.25 s`, or `41.3 ms`."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"
