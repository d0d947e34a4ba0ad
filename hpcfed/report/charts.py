"""Charts as inline SVG: small, without scripts, light or dark as the page is. Every point
has its figures as a tooltip.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isfinite

from markupsafe import Markup

from hpcfed.report.axes import Axis, apart, number_text
from hpcfed.report.svg import (
    COLOURS,
    HEIGHT,
    WIDTH,
    bar_legend,
    figure,
    frame,
    joined,
    line_legend,
    marker,
    rectangle,
    word,
)

LEFT, RIGHT, TOP, BOTTOM = 62, 12, 12, 46
"""Margins around the plane of a drawing, for numbers and names of axes."""
STRIPE = 44
"""Height of a lying bar with its name."""
MOST_MARKERS = 24
"""On one line: more would hide it."""
MOST_REACH = 2.5
"""How many times beyond the points an axis follows the ends of their intervals."""


@dataclass(frozen=True)
class Line:
    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    """Lower ends of the confidence intervals; NaN where there are none."""
    high: Sequence[float] = ()
    """Their upper ends."""
    band: bool = False
    """Intervals as a band, for curves with many points, instead of bars."""
    ideal: bool = False
    """A dashed line without points, to compare with."""
    joined: bool = True
    """Whether a line runs through the points."""

    @property
    def near_ends(self) -> list[float]:
        """Ends of intervals, as far as an axis follows them: those of few runs would
        press everything else together.
        """
        known = [value for value in self.y if isfinite(value)]
        if not known:
            return []
        least = min(known) / MOST_REACH
        most = max(known) * MOST_REACH
        ends = []
        for end in (*self.low, *self.high):
            if isfinite(end):
                ends.append(min(max(end, least), most))
        return ends

    @property
    def intervals(self) -> list[tuple[float, float, float]]:
        """Every x that has an interval, with both its ends."""
        found = []
        for x, low, high in zip(self.x, self.low, self.high, strict=False):
            if isfinite(low) and isfinite(high):
                found.append((x, low, high))
        return found


def chart(lines: Sequence[Line], x: Axis, y: Axis) -> Markup:
    """Draw lines with their intervals over both axes."""
    all_x: list[float] = []
    all_y: list[float] = []
    for line in lines:
        all_x += line.x
        all_y += [*line.y, *line.near_ends]
    plane = _Plane(x.over(all_x), y.over(all_y))
    measured = [line for line in lines if not line.ideal]
    ideals = [line for line in lines if line.ideal]
    inside = [plane.frame()]
    for number, line in enumerate(measured):
        inside.append(plane.line(line, number))
    for line in ideals:
        inside.append(plane.ideal(line))
    legend = line_legend(
        [line.name for line in measured],
        dict.fromkeys(line.name for line in ideals),
    )
    return figure(
        f"{y.label} over {x.label}",
        inside,
        legend,
    )


def bars(
    categories: Sequence[str],
    segments: Mapping[str, Sequence[float]],
    y: Axis,
    x_label: str,
) -> Markup:
    """Draw a stacked bar for every category. A segment has the same colour in all
    charts of its kind, also where others are nowhere above zero.
    """
    colours, segments = _coloured(segments)
    y = Axis(y.label, zero=True).over([0.0, *_totals(segments)])
    plane = _Plane(Axis(x_label, ticks=()), y)
    slot = (WIDTH - LEFT - RIGHT) / max(1, len(categories))
    inside = [plane.frame(named_x=False)]
    for number, category in enumerate(categories):
        left = LEFT + slot * (number + 0.15)
        below = 0.0
        for name, values in segments.items():
            above = below + values[number]
            tip = f"{category}: {name} {number_text(values[number])} ({y.label})"
            top = plane.y(above)
            bottom = plane.y(below)
            inside.append(rectangle(colours[name], left, 0.7 * slot, top, bottom, tip))
            below = above
        inside.append(_category(category, LEFT + slot * (number + 0.5), slot))
    return figure(
        f"{y.label} by {x_label}",
        inside,
        bar_legend(colours),
    )


def stripes(
    categories: Sequence[str], segments: Mapping[str, Sequence[float]], x: Axis
) -> Markup:
    """Draw a stacked bar for every category, lying under its name: for few bars that
    have long names.
    """
    colours, segments = _coloured(segments)
    x = Axis(x.label, zero=True).over([0.0, *_totals(segments)])
    left, right = RIGHT, WIDTH - RIGHT  # nothing stands to the left of the axis
    bottom = TOP + STRIPE * len(categories)

    def position(value: float) -> float:
        return left + x.fraction(value) * (right - left)

    grid = ""
    for tick in x.ticks:
        grid += f"M{position(tick):.1f} {TOP}V{bottom}"
    inside = [frame(grid, left, TOP, right, bottom)]
    for tick in apart(x.ticks, position):
        inside.append(word(number_text(tick), position(tick), bottom + 16))
    inside.append(word(x.label, (left + right) / 2, bottom + 38, kind="name"))
    for number, category in enumerate(categories):
        top = TOP + STRIPE * number
        before = 0.0
        inside.append(word(category, left + 4, top + 14, anchor="start", kind="name"))
        for name, values in segments.items():
            after = before + values[number]
            tip = f"{category}: {name} {number_text(values[number])} ({x.label})"
            start = position(before)
            width = position(after) - position(before)
            upper = top + 19
            lower = top + STRIPE - 6
            inside.append(rectangle(colours[name], start, width, upper, lower, tip))
            before = after
    title = f"{x.label} by options"
    height = bottom + BOTTOM
    return figure(title, inside, bar_legend(colours), height=height)


def _coloured(
    segments: Mapping[str, Sequence[float]],
) -> tuple[dict[str, int], dict[str, Sequence[float]]]:
    """Return segments that are above zero anywhere, and the numbers of their colours.

    Numbers are given before segments are left out, so that charts of one section agree.
    """
    colours, shown = {}, {}
    for number, (name, values) in enumerate(segments.items()):
        if max(values, default=0.0) > 0:
            colours[name] = number
            shown[name] = values
    return colours, shown


def _totals(segments: Mapping[str, Sequence[float]]) -> list[float]:
    """Return the height of every bar."""
    return [sum(values) for values in zip(*segments.values(), strict=True)]


def _category(text: str, x: float, slot: float) -> Markup:
    """Write a bar's name level where it has room, otherwise rising to its right end."""
    y = HEIGHT - BOTTOM + 15
    if 6.6 * len(text) <= slot:
        return word(text, x, y)
    return word(
        text,
        x + 4,
        y - 3,
        anchor="end",
        turn=-28,
    )


@dataclass(frozen=True)
class _Plane:
    """Two axes, and what is drawn between them; SVG's y grows downwards."""

    axis_x: Axis
    axis_y: Axis

    def x(self, value: float) -> float:
        return LEFT + self.axis_x.fraction(value) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        # Ends of intervals may lie beyond the axis, see `Line.near_ends`.
        low, high = self.axis_y.span
        inside = min(max(value, low), high)
        height = HEIGHT - TOP - BOTTOM
        return HEIGHT - BOTTOM - self.axis_y.fraction(inside) * height

    def frame(self, *, named_x: bool = True) -> Markup:
        """Draw the grid, the axes, their numbers and names; without the x axis' where
        bars have names instead.
        """
        bottom = HEIGHT - BOTTOM
        right = WIDTH - RIGHT
        grid = ""
        words = []
        for tick in self.axis_y.ticks:
            y = self.y(tick)
            grid += f"M{LEFT} {y:.1f}H{right}"
            words.append(word(number_text(tick), LEFT - 6, y + 4, anchor="end"))
        for tick in apart(self.axis_x.ticks, self.x) if named_x else ():
            x = self.x(tick)
            grid += f"M{x:.1f} {TOP}V{bottom}"
            words.append(word(number_text(tick), x, bottom + 16))
        middle = (TOP + bottom) / 2
        words.append(word(self.axis_y.label, 12, middle, turn=-90, kind="name"))
        if named_x:
            middle = (LEFT + right) / 2
            words.append(word(self.axis_x.label, middle, HEIGHT - 8, kind="name"))
        return frame(grid, LEFT, TOP, right, bottom) + joined(words)

    def ideal(self, line: Line) -> Markup:
        path = self._path(line.x, line.y)
        drawn = Markup('<path class="ideal" d="{}"><title>{}</title></path>')
        return drawn.format(path, line.name)

    def line(self, line: Line, number: int) -> Markup:
        """Draw intervals, then the line, then the points over both."""
        colour = number % COLOURS
        made = []
        intervals = line.intervals
        if line.band and len(intervals) > 1:
            made.append(self._band(colour, intervals))
        if line.joined:
            path = self._path(line.x, line.y)
            made.append(Markup('<path class="s{}" d="{}"/>').format(colour, path))
        if not line.band:
            for interval in intervals:
                made.append(self._bar(colour, *interval))
        every = ceil(len(line.x) / MOST_MARKERS) or 1
        for point in range(0, len(line.x), every):
            if isfinite(line.y[point]):
                x = self.x(line.x[point])
                y = self.y(line.y[point])
                made.append(marker(number, x, y, self._tip(line, point)))
        return joined(made)

    def _band(
        self, colour: int, intervals: Sequence[tuple[float, float, float]]
    ) -> Markup:
        """Draw one shape: along the upper ends, and back along the lower ones."""
        x, y = [], []
        for at, _, high in intervals:
            x.append(at)
            y.append(high)
        for at, low, _ in reversed(intervals):
            x.append(at)
            y.append(low)
        path = self._path(x, y)
        return Markup('<path class="b{}" d="{}Z"/>').format(colour, path)

    def _bar(self, colour: int, at: float, low: float, high: float) -> Markup:
        """Draw an interval as an upright bar with short ends."""
        x = self.x(at)
        bottom = self.y(low)
        top = self.y(high)
        return Markup(
            f'<path class="s{colour} bar" d="M{x:.1f} {bottom:.1f}V{top:.1f}'
            f'M{x - 3:.1f} {bottom:.1f}h6M{x - 3:.1f} {top:.1f}h6"/>'
        )

    def _tip(self, line: Line, point: int) -> str:
        x = number_text(line.x[point])
        y = number_text(line.y[point])
        tip = f"{line.name}: {self.axis_y.label} {y}, {self.axis_x.label} {x}"
        if point < len(line.low) and isfinite(line.low[point]):
            low = number_text(line.low[point])
            high = number_text(line.high[point])
            tip += f", 95 % between {low} and {high}"
        return tip

    def _path(self, x: Sequence[float], y: Sequence[float]) -> str:
        """Return a path through all points that the y axis shows."""
        points = []
        for across, up in zip(x, y, strict=True):
            if self.axis_y.shows(up):
                points.append(f"{self.x(across):.1f} {self.y(up):.1f}")
        return "M" + "L".join(points) if points else "M0 0"
