"""Charts of stacked bars, upright or lying."""

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from hpcfed.report.axes import Axis, apart, number_text
from hpcfed.report.plane import BOTTOM, LEFT, RIGHT, TOP, Plane
from hpcfed.report.svg import HEIGHT, WIDTH, bar_legend, figure, frame, rectangle, word

STRIPE = 44
"""Height of a lying bar with its name."""
LETTER = 6.6
"""Width of a letter, on average."""

Segments = Mapping[str, Sequence[float]]
"""By name, the value in every bar."""


def bars(
    categories: Sequence[str],
    segments: Segments,
    y: Axis,
    x_label: str,
) -> Markup:
    """Draw an upright bar for every category, with all segments upon each other."""
    colours, _ = _coloured(segments)
    inside = upright(categories, segments, y)
    return figure(f"{y.label} by {x_label}", inside, bar_legend(colours))


def upright(categories: Sequence[str], segments: Segments, y: Axis) -> list[Markup]:
    """Return the shapes of upright bars: the axis, and all segments upon each other."""
    colours, shown = _coloured(segments)
    totals = _totals(shown)
    y = Axis(y.label, zero=True).over([0.0, *totals])
    plane = Plane(Axis("", ticks=()), y)
    number_of_bars = max(1, len(categories))
    slot = (WIDTH - LEFT - RIGHT) / number_of_bars
    width = 0.7 * slot  # the rest of a slot is the gap between bars
    # Names of bars stand where the x axis would have its numbers.
    inside = [plane.frame(named_x=False)]
    for number, category in enumerate(categories):
        left = LEFT + slot * (number + 0.15)
        below = 0.0
        for name, values in shown.items():
            value = values[number]
            above = below + value
            text = number_text(value)
            tip = f"{category}: {name} {text} ({y.label})"
            top = plane.y(above)
            bottom = plane.y(below)
            colour = colours[name]
            drawn = rectangle(colour, left, width, top, bottom, tip)
            inside.append(drawn)
            below = above
        centre = LEFT + slot * (number + 0.5)
        inside.append(_category(category, centre, slot))
    return inside


def _category(text: str, x: float, slot: float) -> Markup:
    """Write a bar's name level where it has room, otherwise rising to its right end."""
    y = HEIGHT - BOTTOM + 15
    if LETTER * len(text) <= slot:
        return word(text, x, y)
    return word(
        text,
        x + 4,
        y - 3,
        anchor="end",
        turn=-28,
    )


def stripes(categories: Sequence[str], segments: Segments, x: Axis) -> Markup:
    """Draw a lying bar for every category, under its name: for few bars that have long
    names.
    """
    colours, shown = _coloured(segments)
    totals = _totals(shown)
    x = Axis(x.label, zero=True).over([0.0, *totals])
    left = RIGHT  # no numbers stand to the left, so both margins are alike
    right = WIDTH - RIGHT
    bottom = TOP + STRIPE * len(categories)

    def position(value: float) -> float:
        width = right - left
        return left + x.fraction(value) * width

    grid = ""
    for tick in x.ticks:
        at = position(tick)
        grid += f"M{at:.1f} {TOP}V{bottom}"
    inside = [frame(grid, left, TOP, right, bottom)]
    for tick in apart(x.ticks, position):
        number = number_text(tick)
        inside.append(word(number, position(tick), bottom + 16))
    middle = (left + right) / 2
    inside.append(word(x.label, middle, bottom + 38, kind="name"))
    for row, category in enumerate(categories):
        top = TOP + STRIPE * row
        name = word(category, left + 4, top + 14, anchor="start", kind="name")
        inside.append(name)
        before = 0.0
        for segment, values in shown.items():
            value = values[row]
            after = before + value
            text = number_text(value)
            tip = f"{category}: {segment} {text} ({x.label})"
            start = position(before)
            drawn = rectangle(
                colours[segment],
                left=start,
                width=position(after) - start,
                top=top + 19,  # under the name
                bottom=top + STRIPE - 6,  # with a gap to the next name
                tip=tip,
            )
            inside.append(drawn)
            before = after
    title = f"{x.label} by options"
    legend = bar_legend(colours)
    return figure(title, inside, legend, height=bottom + BOTTOM)


def _coloured(segments: Segments) -> tuple[dict[str, int], Segments]:
    """Return the numbers of colours, and the segments that are above zero anywhere.

    A segment has the same colour in all charts of a section, so colours are numbered
    before any segment is left out.
    """
    colours, shown = {}, {}
    for number, (name, values) in enumerate(segments.items()):
        if max(values, default=0.0) > 0:
            colours[name] = number
            shown[name] = values
    return colours, shown


def _totals(segments: Segments) -> list[float]:
    """Return the length of every bar."""
    by_bar = zip(*segments.values(), strict=True)
    return [sum(values) for values in by_bar]
