"""A section of the page, and what all sections share: tables of points, lines, and
charts of bars.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from hpcfed.analysis.choices import SIZES, Combination, grouped
from hpcfed.analysis.findings import COUNT, Cell, Table
from hpcfed.analysis.groups import Group
from hpcfed.analysis.labels import label
from hpcfed.analysis.render.charts import Axis, Drawing, Line, bars, lines, stripes
from hpcfed.analysis.statistics import Estimate
from hpcfed.analysis.swept import Held, Swept, held
from hpcfed.analysis.verdicts import Verdict
from hpcfed.errors import count

MOST_LINES = 8
"""Most lines in one chart; more would be hard to distinguish."""
MOST_BARS = 12
"""Most bars in one chart; more would be too thin, or the chart too high."""
LOG_SPREAD = 20
"""From this ratio of the largest to the smallest value on, a scale is logarithmic."""
MOST_LYING = 24
"""Most horizontal bars in a section."""
MOST_BAR_CHARTS = 4
"""Most charts of vertical bars in a section, each for one choice of options."""
T = TypeVar("T")

Segments = Callable[[Group], Mapping[str, float]]
"""Returns the heights of the segments of a group's bar, by name."""


@dataclass
class Section:
    id: str
    """The target of links to it."""
    title: str
    text: list[str] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    charts: list[Drawing] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    listings: list[tuple[str, str]] = field(default_factory=list)
    """Long texts by name, collapsed."""

    @property
    def empty(self) -> bool:
        """Whether it has only a title and remarks."""
        return not (self.verdicts or self.charts or self.tables or self.listings)


def held_text(shown: Held) -> list[str]:
    """Return the sentence that says which points the charts leave out, if any."""
    if not shown.left_out:
        return []
    return [
        f"Charts show the points with {label(shown.options)}. The tables and the CSV have "
        f"{count(shown.left_out, 'more point')}."
    ]


WHICH = ("options", "clients", "ranks")
"""The first columns of a table of points."""


def which(group: Group) -> list[str | Cell]:
    """Return the cells that identify the point of a row."""
    return [label(group.key), COUNT(group.clients), COUNT(group.ranks)]


def points_table(
    every: Sequence[Group],
    columns: Mapping[str, Sequence[str | Cell]],
    caption: str = "",
) -> Table:
    """Return a row for each point; each column has a cell for each of them."""
    rows = []
    for group, *cells in zip(every, *columns.values(), strict=True):
        rows.append([*which(group), *cells])
    return Table((*WHICH, *columns), rows, caption)


def plain_points(
    every: Sequence[Group], plain: Callable[[Group], bool], options: Sequence[str]
) -> dict[Combination, Group]:
    """Return the points that are plain, such as those without noise, by all their
    options but these: so others find the plain point to be compared with.
    """
    found: dict[Combination, Group] = {}
    for group in filter(plain, every):
        found.setdefault(group.options.without(*options), group)
    return found


def estimates_line(
    name: str, x: Sequence[float], estimates: Sequence[Estimate], scale: float = 1.0
) -> Line:
    """Return a line through estimates, with their intervals."""
    return Line(
        name,
        x=[float(value) for value in x],
        y=[scale * estimate.centre for estimate in estimates],
        low=[scale * estimate.low for estimate in estimates],
        high=[scale * estimate.high for estimate in estimates],
    )


def line_charts(
    title: str, every: Sequence[Line], x: Axis, y: Axis
) -> Iterator[Drawing]:
    """Draw lines in as many charts as they need to be readable."""
    for some in batches(every, MOST_LINES):
        yield lines(title, some, x, y)


def batches(items: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    """Split a list into pieces for one chart each."""
    for start in range(0, len(items), most):
        yield items[start : start + most]


def ticks(lines: Sequence[Line]) -> list[float]:
    """Return every measured x."""
    return sorted({x for line in lines for x in line.x})


def by_key(every: Sequence[Group]) -> dict[Combination, list[Group]]:
    """Group points that differ only in clients and ranks, and sort by these."""
    by_size = sorted(every, key=lambda group: (group.ranks, group.clients))
    return grouped(by_size, lambda group: group.key)


def one_size_each(every: Sequence[Group]) -> bool:
    """Tell whether each of several choices of options was run with only one number of
    clients and ranks, so that there is nothing to draw over.
    """
    # A single choice has its own chart anyway.
    families = by_key(every)
    sizes = [len(members) for members in families.values()]
    return len(families) > 1 and max(sizes) == 1


def few_bars(every: Sequence[Group], options: Sequence[Swept]) -> Held:
    """Hold options until the bars of all points fit into a few charts."""
    most = MOST_LYING if one_size_each(every) else MOST_BAR_CHARTS
    return held(every, options, keep=SIZES, most=most)


def stacked_bars(every: Sequence[Group], segments: Segments, y: Axis) -> list[Drawing]:
    """Draw a chart for each choice of options, or one for all of them if each has a
    single bar.
    """
    # A chart with a single bar shows nothing; side by side, bars can be compared.
    if one_size_each(every):
        return lying_bars(every, segments, y)
    charts = []
    for key, family in by_key(every).items():
        for members in batches(family, MOST_BARS):
            names = [size_name(group) for group in members]
            heights = _heights(members, segments)
            charts.append(bars(label(key), names, heights, y, "clients on ranks"))
    return charts


def lying_bars(every: Sequence[Group], segments: Segments, x: Axis) -> list[Drawing]:
    """Draw a horizontal bar for each group, below its long name."""
    title = f"{x.label} by options: clients on ranks"
    charts = []
    for members in batches(every, MOST_BARS):
        names = [f"{label(group.key)}: {size_name(group)}" for group in members]
        charts.append(stripes(title, names, _heights(members, segments), x))
    return charts


def size_name(group: Group) -> str:
    """Return `100 on 2`: clients on ranks."""
    return f"{group.clients:,} on {group.ranks}"


def _heights(every: Sequence[Group], segments: Segments) -> dict[str, list[float]]:
    # All groups have the same segments.
    of_groups = [segments(group) for group in every]
    return {name: [one[name] for one in of_groups] for name in of_groups[0]}
