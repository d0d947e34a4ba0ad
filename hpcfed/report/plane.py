"""The plane of a drawing: two axes, their grid, numbers and names."""

from dataclasses import dataclass

from markupsafe import Markup

from hpcfed.report.axes import Axis, apart, number_text
from hpcfed.report.svg import HEIGHT, WIDTH, frame, joined, word

LEFT, RIGHT, TOP, BOTTOM = 62, 12, 12, 46
"""Margins around the plane, for numbers and names of axes."""


@dataclass(frozen=True)
class Plane:
    """Two axes, and where values lie between them; SVG's y grows downwards."""

    axis_x: Axis
    axis_y: Axis

    def x(self, value: float) -> float:
        width = WIDTH - LEFT - RIGHT
        return LEFT + self.axis_x.fraction(value) * width

    def y(self, value: float) -> float:
        # Ends of intervals may lie beyond the axis, see `Line.near_ends`.
        low, high = self.axis_y.span
        inside = min(max(value, low), high)
        height = HEIGHT - TOP - BOTTOM
        up = self.axis_y.fraction(inside) * height
        return HEIGHT - BOTTOM - up

    def frame(self, *, named_x: bool = True) -> Markup:
        """Draw the grid, the axes, their numbers and names; nothing of the x axis where
        bars have names instead.
        """
        bottom = HEIGHT - BOTTOM
        right = WIDTH - RIGHT
        grid = ""
        words = []
        for tick in self.axis_y.ticks:
            y = self.y(tick)
            grid += f"M{LEFT} {y:.1f}H{right}"
            number = number_text(tick)
            words.append(word(number, LEFT - 6, y + 4, anchor="end"))
        # Numbers of measured sizes, such as 1, 2, 4, 100, 128, may stand too close.
        x_ticks = apart(self.axis_x.ticks, self.x) if named_x else []
        for tick in x_ticks:
            x = self.x(tick)
            grid += f"M{x:.1f} {TOP}V{bottom}"
            number = number_text(tick)
            words.append(word(number, x, bottom + 16))
        middle = (TOP + bottom) / 2
        name = self.axis_y.label
        words.append(word(name, 12, middle, turn=-90, kind="name"))
        if named_x:
            middle = (LEFT + right) / 2
            name = self.axis_x.label
            words.append(word(name, middle, HEIGHT - 8, kind="name"))
        lines = frame(grid, LEFT, TOP, right, bottom)
        return lines + joined(words)
