"""Charts of lines as inline SVG: small, without scripts, light or dark as the page is.
Every point has its figures as a tooltip.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isfinite

from markupsafe import Markup

from hpcfed.report.axes import Axis, number_text
from hpcfed.report.plane import Plane
from hpcfed.report.svg import COLOURS, figure, joined, line_legend, marker

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
    interval: str = "95 %"
    """What the intervals are, in a word."""
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
        # A line without intervals has no ends at all.
        for x, low, high in zip(self.x, self.low, self.high, strict=False):
            if isfinite(low) and isfinite(high):
                found.append((x, low, high))
        return found


def chart(lines: Sequence[Line], x: Axis, y: Axis) -> Markup:
    """Draw lines with their intervals over both axes, for a page."""
    names = [line.name for line in lines if not line.ideal]
    ideals = [line.name for line in lines if line.ideal]
    title = f"{y.label} over {x.label}"
    return figure(title, plot(lines, x, y), line_legend(names, ideals))


def plot(lines: Sequence[Line], x: Axis, y: Axis) -> list[Markup]:
    """Return the shapes of a chart: axes, and lines with their intervals."""
    all_x: list[float] = []
    all_y: list[float] = []
    for line in lines:
        all_x += line.x
        all_y += line.y
        all_y += line.near_ends
    plane = Plane(x.over(all_x), y.over(all_y))
    inside = [plane.frame()]
    coloured = 0
    for line in lines:
        if line.ideal:
            inside.append(_ideal(plane, line))
        else:
            # Dashed lines take no colour, so that the others have theirs in any chart.
            inside.append(_line(plane, line, coloured))
            coloured += 1
    return inside


def _ideal(plane: Plane, line: Line) -> Markup:
    path = _path(plane, line.x, line.y)
    drawn = Markup('<path class="ideal" d="{}"><title>{}</title></path>')
    return drawn.format(path, line.name)


def _line(plane: Plane, line: Line, number: int) -> Markup:
    """Draw intervals, the line, and the points over both."""
    colour = number % COLOURS
    made = []
    # SVG draws later shapes over earlier ones. A band lies under its line, bars lie over it.
    if line.band and len(line.intervals) > 1:
        made.append(_band(plane, line, colour))
    if line.joined:
        path = _path(plane, line.x, line.y)
        drawn = Markup('<path class="s{}" d="{}"/>')
        made.append(drawn.format(colour, path))
    if not line.band:
        for at, low, high in line.intervals:
            made.append(_bar(plane, colour, at, low, high))
    step = ceil(len(line.x) / MOST_MARKERS) or 1
    for point in range(0, len(line.x), step):
        if isfinite(line.y[point]):
            x = plane.x(line.x[point])
            y = plane.y(line.y[point])
            tip = _tip(plane, line, point)
            made.append(marker(number, x, y, tip))
    return joined(made)


def _band(plane: Plane, line: Line, colour: int) -> Markup:
    """Draw one shape: along the upper ends, and back along the lower ones."""
    x, y = [], []
    for at, _, high in line.intervals:
        x.append(at)
        y.append(high)
    for at, low, _ in reversed(line.intervals):
        x.append(at)
        y.append(low)
    path = _path(plane, x, y)
    return Markup('<path class="b{}" d="{}Z"/>').format(colour, path)


def _bar(plane: Plane, colour: int, at: float, low: float, high: float) -> Markup:
    """Draw an interval as an upright bar with short ends."""
    x = plane.x(at)
    bottom = plane.y(low)
    top = plane.y(high)
    return Markup(
        f'<path class="s{colour} bar" d="M{x:.1f} {bottom:.1f}V{top:.1f}'
        f'M{x - 3:.1f} {bottom:.1f}h6M{x - 3:.1f} {top:.1f}h6"/>'
    )


def _tip(plane: Plane, line: Line, point: int) -> str:
    """Return a point's figures, with its interval where it has one."""
    x = number_text(line.x[point])
    y = number_text(line.y[point])
    tip = f"{line.name}: "
    tip += f"{plane.axis_y.label} {y}, "
    tip += f"{plane.axis_x.label} {x}"
    if line.low and isfinite(line.low[point]):
        low = number_text(line.low[point])
        high = number_text(line.high[point])
        tip += f", {line.interval} between {low} and {high}"
    return tip


def _path(plane: Plane, x: Sequence[float], y: Sequence[float]) -> str:
    """Return a path through all points that the y axis shows."""
    points = []
    for across, up in zip(x, y, strict=True):
        if plane.axis_y.shows(up):
            x_text = f"{plane.x(across):.1f}"
            y_text = f"{plane.y(up):.1f}"
            points.append(f"{x_text} {y_text}")
    if not points:
        return "M0 0"  # a path must have something in it
    return "M" + "L".join(points)
