"""Small curves on a terminal: a cell of braille has two by four dots."""

from collections.abc import Mapping

import numpy as np
from rich.text import Text

DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""What each dot of a cell adds to its code: by column, from top to bottom."""
BLANK = 0x2800


def curves(
    series: Mapping[str, np.ndarray], *, width: int, height: int, ascii_only: bool
) -> tuple[list[Text], float, float]:
    """Draw series over rounds, each in the style that it goes by; return the lines, and
    the values at the bottom and at the top.

    NaN stands for rounds without a value.
    """
    known = {}
    for style, values in series.items():
        if np.isfinite(values).any():
            known[style] = values
    if not known:
        return [Text(" " * width) for _ in range(height)], np.nan, np.nan
    every = np.concatenate([values[np.isfinite(values)] for values in known.values()])
    low, high = float(every.min()), float(every.max())
    codes = np.zeros((height, width), int)
    styles = np.full((height, width), "", object)
    for style, values in known.items():
        for column, (top, bottom) in _strokes(values, low, high, 2 * width, 4 * height):
            for row in range(top, bottom + 1):
                codes[row // 4, column // 2] |= DOTS[column % 2][row % 4]
                styles[row // 4, column // 2] = style
    lines = []
    for of_cells, of_styles in zip(codes, styles, strict=True):
        line = Text()
        for code, style in zip(of_cells, of_styles, strict=True):
            drawn = "*" if ascii_only else chr(BLANK + code)
            line.append(drawn if code else " ", style)
        lines.append(line)
    return lines, low, high


def _strokes(
    values: np.ndarray, low: float, high: float, columns: int, rows: int
) -> list[tuple[int, tuple[int, int]]]:
    """Return which rows of dots a curve takes in each of its columns, from the first
    known value to the last.
    """
    known = np.flatnonzero(np.isfinite(values))
    # Of rounds without a value the curve takes what lies between their neighbours.
    places = np.linspace(0, max(len(values) - 1, 1), columns)
    inside = (places >= known[0]) & (places <= known[-1])
    # A single round may lie between two dots.
    inside[np.abs(places - known[-1]).argmin()] = True
    heights = np.interp(places, known, values[known])
    span = high - low or 1.0
    dots = np.rint((high - heights) / span * (rows - 1)).astype(int)
    strokes = []
    last = None
    for column in np.flatnonzero(inside):
        dot = int(dots[column])
        # A steep curve stays one line.
        begin = dot if last is None else last
        strokes.append((int(column), (min(begin, dot), max(begin, dot))))
        last = dot
    return strokes
