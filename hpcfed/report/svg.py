"""Shapes, words and legends of charts, as SVG in the colours of the page's style sheet.

Whatever comes from a run goes through `Markup.format`, which escapes it.
"""

from collections.abc import Iterable, Mapping, Sequence

from markupsafe import Markup

# In the drawing's own units; the page scales it to its column.
WIDTH, HEIGHT = 480, 300
COLOURS = 10
"""Classes s0 … s9 (strokes), f0 … f9 (fills) and b0 … b9 (bands) of the style sheet."""
MARKERS = (
    "M-3.2 0a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0 -6.4 0",
    "M-3 -3h6v6h-6z",
    "M0 -3.8L3.6 2.8H-3.6z",
    "M0 -4L4 0L0 4L-4 0z",
)
"""Disc, square, triangle, diamond: lines differ in marker as well as in colour."""


def joined(pieces: Iterable[Markup]) -> Markup:
    return Markup("").join(pieces)


def rectangle(
    colour: int, left: float, width: float, top: float, bottom: float, tip: str
) -> Markup:
    # One decimal is enough for a screen, and keeps the page small.
    shape = (
        f'class="f{colour % COLOURS}" x="{left:.1f}" y="{top:.1f}" '
        f'width="{width:.1f}" height="{bottom - top:.1f}"'
    )
    return Markup("<rect {}><title>{}</title></rect>").format(Markup(shape), tip)


def word(
    text: str,
    x: float,
    y: float,
    *,
    anchor: str = "middle",
    turn: float = 0,
    kind: str = "",
) -> Markup:
    """Write a text, turned by so many degrees; `kind` is a class of the style sheet."""
    attributes = f' class="{kind}"' if kind else ""
    attributes += f' x="{x:.1f}" y="{y:.1f}"'
    attributes += f' text-anchor="{anchor}"'
    if turn:
        # Around the text itself; by itself, rotate turns around the drawing's corner.
        centre = f"{x:.1f} {y:.1f}"
        attributes += f' transform="rotate({turn:g} {centre})"'
    return Markup("<text{}>{}</text>").format(Markup(attributes), text)


def frame(grid: str, left: float, top: float, right: float, bottom: float) -> Markup:
    """Draw the grid, and the axes to the left and below."""
    # One path for all lines of the grid keeps the page small.
    axes = f"M{left} {top}V{bottom}H{right}"
    return Markup(f'<path class="grid" d="{grid}"/><path class="axis" d="{axes}"/>')


def marker(number: int, x: float, y: float, tip: str) -> Markup:
    """Draw a point of a line, with its figures as a tooltip."""
    shape = MARKERS[number % len(MARKERS)]
    drawn = (
        '<path class="f{}" transform="translate({:.1f} {:.1f})" d="{}">'
        "<title>{}</title></path>"
    )
    return Markup(drawn).format(
        number % COLOURS,
        x,
        y,
        shape,
        tip,
    )


def figure(
    title: str, inside: Sequence[Markup], legend: Markup, *, height: int = HEIGHT
) -> Markup:
    """Put a drawing and its legend together. The legend stands outside as text, so that
    it wraps on a narrow screen.
    """
    # `aria-label` is what a screen reader says of the drawing.
    drawn = (
        '<figure><svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>'
        "<figcaption>{}</figcaption></figure>"
    )
    return Markup(drawn).format(
        WIDTH,
        height,
        title,
        joined(inside),
        legend,
    )


def line_legend(names: Sequence[str], ideals: Sequence[str]) -> Markup:
    """Explain lines by colour and marker, then dashed lines."""
    entries = []
    for number, name in enumerate(names):
        colour = number % COLOURS
        shape = MARKERS[number % len(MARKERS)]
        line = f'<path class="s{colour}" d="M1 5H21"/>'
        point = f'<path class="f{colour}" transform="translate(11 5)" d="{shape}"/>'
        entries.append(_entry(line + point, name))
    for name in dict.fromkeys(ideals):  # each once
        entries.append(_entry('<path class="ideal" d="M1 5H21"/>', name))
    return joined(entries)


def bar_legend(colours: Mapping[str, int]) -> Markup:
    """Explain segments of bars, by the numbers of their colours."""
    entries = []
    for name, number in colours.items():
        fill = number % COLOURS
        shape = f'<rect class="f{fill}" x="2" y="0" width="14" height="10"/>'
        entries.append(_entry(shape, name))
    return joined(entries)


def _entry(shape: str, name: str) -> Markup:
    # `format` escapes the name; the shape is ours.
    drawn = '<span><svg class="key" viewBox="0 0 22 10">{}</svg>{}</span>'
    return Markup(drawn).format(Markup(shape), name)
