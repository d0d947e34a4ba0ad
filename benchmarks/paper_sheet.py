"""A picture as an SVG file of its own: a title, a drawing of the report's charts, a
legend; for benchmarks/paper_figures.py.
"""

from collections.abc import Sequence
from textwrap import wrap

from markupsafe import Markup

from hpcfed.report.svg import COLOURS, HEIGHT, MARKERS, WIDTH, joined, word

INK = (
    "#1f6fb4", "#c8541a", "#1b8a5a", "#a23b8f", "#8a6d00",
    "#4b5bd0", "#b3263b", "#3f7d8a", "#7a6a5a", "#98a1ab",
)  # fmt: skip
"""The report's colours on white paper: a file has no reader's dark mode to follow."""
LETTER = 6.4
"""Width of a letter, on average; a little more than it is, so that nothing is cut."""
LEADING = 17
"""From one line of text to the next."""
MARGIN = 12
SCALE = 1.6
"""Pixels of the file by units of the drawing."""


def sheet(
    title: str, notes: Sequence[str], shapes: Sequence[Markup], legend: Sequence[str]
) -> str:
    """Return the picture as the text of an SVG file.

    The `notes` stand under the title. The `legend` names the drawing's lines in the order
    of their colours; none where the drawing explains itself.
    """
    letters = int((WIDTH - 2 * MARGIN) / LETTER)
    words = []
    top = 0
    for line in wrap(title, letters):
        top += LEADING
        words.append(word(line, MARGIN, top, anchor="start", kind="title"))
    for note in notes:
        for line in wrap(note, letters):
            top += LEADING - 2
            words.append(word(line, MARGIN, top, anchor="start"))
    top += 8
    drawing = Markup('<g transform="translate(0 {})">{}</g>')
    drawn = drawing.format(top, joined(shapes))
    keys, height = _legend(legend, top + HEIGHT + LEADING)
    return str(_document(joined([*words, drawn, *keys]), height + MARGIN))


def _legend(names: Sequence[str], top: float) -> tuple[list[Markup], float]:
    """Draw the legend in as many lines as it needs; return where it ends, too.

    Its first line stays empty where there is none: rising names of bars reach into it.
    """
    keys: list[Markup] = []
    left: float = MARGIN
    for number, name in enumerate(names):
        width = 30 + LETTER * len(name)
        if left > MARGIN and left + width > WIDTH:
            left = MARGIN
            top += LEADING
        keys.append(_key(number, name, left, top))
        left += width + 10
    return keys, top


def _key(number: int, name: str, left: float, top: float) -> Markup:
    colour = number % COLOURS
    line = f'<path class="s{colour}" d="M{left:.1f} {top - 4}h20"/>'
    at = f"translate({left + 10:.1f} {top - 4})"
    shape = MARKERS[number % len(MARKERS)]
    point = f'<path class="f{colour}" transform="{at}" d="{shape}"/>'
    return Markup(line + point) + word(name, left + 25, top, anchor="start")


def _document(inside: Markup, height: float) -> Markup:
    size = f'width="{WIDTH * SCALE:.0f}" height="{height * SCALE:.0f}"'
    box = f'viewBox="0 0 {WIDTH} {height:.0f}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box}>'
    paper = '<rect width="100%" height="100%" fill="#fff"/>'
    style = f"<style>{_style()}</style>"
    return Markup(opening + style + paper) + inside + Markup("</svg>\n")


def _style() -> str:
    """Return the style sheet: the report's classes, in fixed colours."""
    rules = [
        "text{font:12px sans-serif;fill:#59636e}",
        "text.name{fill:#1b1f24}",
        "text.title{fill:#1b1f24;font-weight:bold}",
        ".grid{stroke:#d5dae0;fill:none}",
        ".axis{stroke:#59636e;fill:none}",
        ".ideal{stroke:#59636e;fill:none;stroke-dasharray:5 4;stroke-width:1.5}",
    ]
    for number, ink in enumerate(INK):
        rules += [
            f".s{number}{{stroke:{ink};fill:none;stroke-width:2}}",
            f".f{number}{{fill:{ink}}}",
            f".b{number}{{fill:{ink};opacity:.18}}",
        ]
    # Last, because it wins over the width of a line.
    rules.append(".bar{stroke-width:1.3}")
    return "".join(rules)
