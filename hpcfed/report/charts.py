"""Charts as inline SVG: small, without scripts, in the colours of the page's style
sheet, light or dark.

Every point has its figures as a tooltip, lines differ in marker as well as in colour,
and legends stand beside the drawing as text, so that they wrap on a narrow screen.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, isfinite, log10

from markupsafe import Markup, escape

WIDTH, HEIGHT = 480, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 12, 46
STRIPE = 44
"""Height of a lying bar with its name."""
COLOURS = 10
MARKERS = (
    "M-3.2 0a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0 -6.4 0",
    "M-3 -3h6v6h-6z",
    "M0 -3.8L3.6 2.8H-3.6z",
    "M0 -4L4 0L0 4L-4 0z",
)
MOST_TICKS = 7
MOST_MARKERS = 24
"""Of a line: more would hide it."""
MOST_REACH = 2.5
"""How many times beyond the points an axis follows the ends of their intervals."""


@dataclass(frozen=True)
class Line:
    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    """Ends of the confidence intervals; NaN where there are none."""
    high: Sequence[float] = ()
    band: bool = False
    """Intervals as a band, for curves with many points, instead of bars."""
    ideal: bool = False
    """A dashed line without points, to compare with."""
    joined: bool = True
    """Whether a line runs through the points."""


@dataclass(frozen=True)
class Axis:
    label: str
    """With its unit."""
    log: bool = False
    ticks: Sequence[float] = ()
    """Where they are, if not anywhere."""
    zero: bool = False
    """Whether the axis begins at zero."""
    whole: bool = False
    """Whether only whole numbers have a meaning."""
    span: tuple[float, float] = field(default=(0.0, 1.0))

    def of(self, values: Iterable[float]) -> "Axis":
        known = [v for v in values if isfinite(v) and (v > 0 or not self.log)]
        low, high = (min(known), max(known)) if known else (1.0, 10.0)
        if self.log:
            low, high = (
                (low / 1.15, high * 1.15)
                if low == high or self.ticks
                else (low / 1.05, high * 1.05)
            )
        else:
            low = 0.0 if self.zero else low
            pad = 0.04 * (high - low) or 0.5 * abs(high) or 1.0
            low, high = (low if self.zero else low - pad), high + pad
        ticks = self.ticks or [
            t
            for t in _ticks(low, high, log=self.log)
            if not self.whole or t == round(t)
        ]
        return Axis(self.label, self.log, ticks, self.zero, self.whole, (low, high))

    def at(self, value: float) -> float:
        """From 0 to 1."""
        scale: Callable[[float], float] = log10 if self.log else float
        low, high = (scale(end) for end in self.span)
        return (scale(value) - low) / (high - low)


def chart(lines: Sequence[Line], x: Axis, y: Axis) -> Markup:
    """Lines with their intervals over both axes."""
    x = x.of(v for line in lines for v in line.x)
    y = y.of([v for line in lines for v in (*line.y, *_near(line))])
    plane = _Plane(x, y)
    inside = [plane.frame()]
    coloured = 0
    for line in lines:
        inside.append(plane.ideal(line) if line.ideal else plane.line(line, coloured))
        coloured += not line.ideal
    return _figure(f"{y.label} over {x.label}", inside, _legend(lines))


def bars(
    categories: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    y: Axis,
    x_label: str,
) -> Markup:
    """A stacked bar for every category. A part's colour is its own, also where others
    are nowhere above zero.
    """
    colours = {name: number for number, name in enumerate(parts)}
    parts = {
        name: values for name, values in parts.items() if max(values, default=0.0) > 0
    }
    totals = [sum(values) for values in zip(*parts.values(), strict=True)]
    y = Axis(y.label, zero=True).of([0.0, *totals])
    plane = _Plane(Axis(x_label, ticks=()), y)
    slot = (WIDTH - LEFT - RIGHT) / max(1, len(categories))
    inside = [plane.frame(named_x=False)]
    for number, category in enumerate(categories):
        left, below = LEFT + slot * (number + 0.15), 0.0
        for name, values in parts.items():
            above = below + values[number]
            tip = f"{category}: {name} {_text(values[number])} ({y.label})"
            inside.append(
                _rectangle(
                    colours[name], left, 0.7 * slot, plane.y(above), plane.y(below), tip
                )
            )
            below = above
        inside.append(_category(category, LEFT + slot * (number + 0.5), slot))
    return _figure(
        f"{y.label} by {x_label}",
        inside,
        _entries({name: colours[name] for name in parts}),
    )


def stripes(
    categories: Sequence[str], parts: Mapping[str, Sequence[float]], x: Axis
) -> Markup:
    """A stacked bar for every category, lying under its name: for few bars that have
    long names.
    """
    colours = {name: number for number, name in enumerate(parts)}
    parts = {
        name: values for name, values in parts.items() if max(values, default=0.0) > 0
    }
    x = Axis(x.label, zero=True).of(
        [0.0, *(sum(values) for values in zip(*parts.values(), strict=True))]
    )
    bottom, right = TOP + STRIPE * len(categories), WIDTH - RIGHT

    def place(value: float) -> float:
        return RIGHT + x.at(value) * (right - RIGHT)

    grid = "".join(f"M{place(tick):.1f} {TOP}V{bottom}" for tick in x.ticks)
    inside = [
        Markup(
            f'<path class="grid" d="{grid}"/><path class="axis" d="M{RIGHT} {TOP}V{bottom}H{right}"/>'
        )
    ]
    inside += [
        _word(_text(tick), place(tick), bottom + 16) for tick in _apart(x.ticks, place)
    ]
    inside.append(_word(x.label, (RIGHT + right) / 2, bottom + 38, kind="name"))
    for number, category in enumerate(categories):
        top, before = TOP + STRIPE * number, 0.0
        inside.append(_word(category, RIGHT + 4, top + 14, anchor="start", kind="name"))
        for name, values in parts.items():
            after = before + values[number]
            tip = f"{category}: {name} {_text(values[number])} ({x.label})"
            width = place(after) - place(before)
            inside.append(
                _rectangle(
                    colours[name], place(before), width, top + 19, top + STRIPE - 6, tip
                )
            )
            before = after
    legend = _entries({name: colours[name] for name in parts})
    return _figure(f"{x.label} by options", inside, legend, height=bottom + BOTTOM)


def _rectangle(
    colour: int, left: float, width: float, top: float, bottom: float, tip: str
) -> Markup:
    shape = f'class="f{colour % COLOURS}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{bottom - top:.1f}"'
    return Markup("<rect {}><title>{}</title></rect>").format(Markup(shape), tip)


def _word(
    text: str,
    x: float,
    y: float,
    *,
    anchor: str = "middle",
    turn: float = 0,
    kind: str = "",
) -> Markup:
    named = f' class="{kind}"' if kind else ""
    turned = f' transform="rotate({turn:g} {x:.1f} {y:.1f})"' if turn else ""
    place = f'{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turned}'
    return Markup("<text{}>{}</text>").format(Markup(place), text)


def _category(text: str, x: float, slot: float) -> Markup:
    """Level where it has room, otherwise rising to the right end of its bar."""
    y = HEIGHT - BOTTOM + 15
    level = 6.6 * len(text) <= slot
    return (
        _word(text, x, y)
        if level
        else _word(text, x + 4, y - 3, anchor="end", turn=-28)
    )


@dataclass(frozen=True)
class _Plane:
    axis_x: Axis
    axis_y: Axis

    def x(self, value: float) -> float:
        return LEFT + self.axis_x.at(value) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        inside = min(max(value, self.axis_y.span[0]), self.axis_y.span[1])
        return HEIGHT - BOTTOM - self.axis_y.at(inside) * (HEIGHT - TOP - BOTTOM)

    def frame(self, *, named_x: bool = True) -> Markup:
        bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        grid, words = "", []
        for tick in self.axis_y.ticks:
            grid += f"M{LEFT} {self.y(tick):.1f}H{right}"
            words.append(_word(_text(tick), LEFT - 6, self.y(tick) + 4, anchor="end"))
        for tick in _apart(self.axis_x.ticks, self.x) if named_x else ():
            grid += f"M{self.x(tick):.1f} {TOP}V{bottom}"
            words.append(_word(_text(tick), self.x(tick), bottom + 16))
        words.append(
            _word(self.axis_y.label, 12, (TOP + bottom) / 2, turn=-90, kind="name")
        )
        if named_x:
            words.append(
                _word(self.axis_x.label, (LEFT + right) / 2, HEIGHT - 8, kind="name")
            )
        lines = f'<path class="grid" d="{grid}"/><path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>'
        return Markup(lines) + Markup("").join(words)

    def ideal(self, line: Line) -> Markup:
        return Markup('<path class="ideal" d="{}"><title>{}</title></path>').format(
            self._path(line.x, line.y), line.name
        )

    def line(self, line: Line, number: int) -> Markup:
        colour, marker = number % COLOURS, MARKERS[number % len(MARKERS)]
        made = [
            Markup('<path class="s{}" d="{}"/>').format(
                colour, self._path(line.x, line.y)
            )
        ] * line.joined
        triples = zip(line.x, line.low, line.high, strict=False)
        ends = [
            (at, low, high)
            for at, low, high in triples
            if isfinite(low) and isfinite(high)
        ]
        if line.band and len(ends) > 1:
            around = [
                *((at, high) for at, _, high in ends),
                *((at, low) for at, low, _ in reversed(ends)),
            ]
            xs, ys = zip(*around, strict=True)
            made.insert(
                0,
                Markup('<path class="b{}" d="{}Z"/>').format(
                    colour, self._path(xs, ys)
                ),
            )
        elif not line.band:
            made += [self._bar(colour, *end) for end in ends]
        some = range(0, len(line.x), ceil(len(line.x) / MOST_MARKERS) or 1)
        made += [
            self._marker(line, i, colour, marker) for i in some if isfinite(line.y[i])
        ]
        return Markup("").join(made)

    def _bar(self, colour: int, at: float, low: float, high: float) -> Markup:
        x, bottom, top = self.x(at), self.y(low), self.y(high)
        return Markup(
            f'<path class="s{colour} bar" d="M{x:.1f} {bottom:.1f}V{top:.1f}'
            f'M{x - 3:.1f} {bottom:.1f}h6M{x - 3:.1f} {top:.1f}h6"/>'
        )

    def _marker(self, line: Line, i: int, colour: int, marker: str) -> Markup:
        tip = f"{line.name}: {self.axis_y.label} {_text(line.y[i])}, {self.axis_x.label} {_text(line.x[i])}"
        if i < len(line.low) and isfinite(line.low[i]):
            tip += f", 95 % between {_text(line.low[i])} and {_text(line.high[i])}"
        return Markup(
            '<path class="f{}" transform="translate({:.1f} {:.1f})" d="{}"><title>{}</title></path>'
        ).format(colour, self.x(line.x[i]), self.y(line.y[i]), marker, tip)

    def _path(self, x: Sequence[float], y: Sequence[float]) -> str:
        known = [
            (a, b)
            for a, b in zip(x, y, strict=True)
            if isfinite(b) and (b > 0 or not self.axis_y.log)
        ]
        return (
            "M" + "L".join(f"{self.x(a):.1f} {self.y(b):.1f}" for a, b in known)
            if known
            else "M0 0"
        )


def _near(line: Line) -> list[float]:
    """Ends of intervals as far as the axis follows them: those of few runs would press
    everything else together.
    """
    known = [value for value in line.y if isfinite(value)]
    if not known:
        return []
    least, most = min(known) / MOST_REACH, max(known) * MOST_REACH
    return [
        min(max(end, least), most) for end in (*line.low, *line.high) if isfinite(end)
    ]


def _figure(
    title: str, inside: Sequence[Markup], legend: Markup, *, height: int = HEIGHT
) -> Markup:
    return Markup(
        '<figure><svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg><figcaption>{}</figcaption></figure>'
    ).format(WIDTH, height, title, Markup("").join(inside), legend)


def _legend(lines: Sequence[Line]) -> Markup:
    coloured = [line.name for line in lines if not line.ideal]
    own = _entries({name: number for number, name in enumerate(coloured)}, marked=True)
    ideal = dict.fromkeys(line.name for line in lines if line.ideal)
    drawn = (
        '<svg class="key" viewBox="0 0 22 10"><path class="ideal" d="M1 5H21"/></svg>'
    )
    return own + Markup("").join(
        Markup("<span>") + Markup(drawn) + escape(name) + Markup("</span>")
        for name in ideal
    )


def _entries(names: Mapping[str, int], *, marked: bool = False) -> Markup:
    """Names with the numbers of their colours."""
    made = []
    for name, number in names.items():
        colour = number % COLOURS
        shape = f'<rect class="f{colour}" x="2" y="0" width="14" height="10"/>'
        if marked:
            marker = MARKERS[number % len(MARKERS)]
            shape = f'<path class="s{colour}" d="M1 5H21"/>'
            shape += (
                f'<path class="f{colour}" transform="translate(11 5)" d="{marker}"/>'
            )
        made.append(
            Markup(
                '<span><svg class="key" viewBox="0 0 22 10">{}</svg>{}</span>'
            ).format(Markup(shape), name)
        )
    return Markup("").join(made)


def _apart(ticks: Sequence[float], place: Callable[[float], float]) -> list[float]:
    """Ticks whose numbers do not run into each other."""
    kept = list(ticks[:1])
    for tick in ticks[1:]:
        room = 3.5 * (len(_text(tick)) + len(_text(kept[-1]))) + 6
        if place(tick) - place(kept[-1]) >= room:
            kept.append(tick)
    return kept


def _ticks(low: float, high: float, *, log: bool) -> list[float]:
    if log:
        decades = range(floor(log10(low)), ceil(log10(high)) + 1)
        for steps in ((1, 2, 5), (1, 3), (1,)):
            marks = [step * 10.0**decade for decade in decades for step in steps]
            marks = [mark for mark in marks if low <= mark <= high]
            if 2 <= len(marks) <= MOST_TICKS:
                return marks
        if len(marks) > MOST_TICKS:
            return marks[:: ceil(len(marks) / MOST_TICKS)]
    raw = (high - low) / 5
    size = 10.0 ** floor(log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw)
    first = ceil(low / step)
    return [number * step for number in range(first, floor(high / step + 1e-9) + 1)]


def _text(value: float) -> str:
    """Short, without exponents where possible."""
    if value == 0 or not isfinite(value):
        return "0" if value == 0 else "?"
    if abs(value) >= 1e6:
        return f"{value:.3g}".replace("e+0", "e").replace("e+", "e")
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-4 else f"{value:.1e}".replace("e-0", "e-")


def spread(values: Sequence[float]) -> float:
    """The largest by the smallest, to choose between scales."""
    known = [value for value in values if isfinite(value) and value > 0]
    return max(known) / min(known) if known else 1.0
