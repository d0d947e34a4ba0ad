"""Comparison of two paths, A and B: what changed, and its effect."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import inf, log

from hpcfed.analysis.comparison.comparison import Comparison, Figure, PointPair
from hpcfed.analysis.comparison.shown import (
    changed,
    point_name,
    shown_costs,
    tables,
    verdict,
    verdicts,
)
from hpcfed.analysis.labels import both_series
from hpcfed.analysis.render.charts import Axis, Drawing, Line, Mark, lines, rows
from hpcfed.analysis.render.sections.accuracy import curve_of
from hpcfed.analysis.render.sections.section import Section
from hpcfed.options.metrics import HEADLINES, METRICS, label_of
from hpcfed.results.pace import SECONDS_PER_ROUND
from hpcfed.words import MINUS

MOST_DOTS = 16
"""Most dots in a chart; of more points, it shows those that differ most."""
VERDICTS = (
    "not told apart", "slower", "faster", "more", "less", "one run each", "same",
    "lower", "higher",
)  # fmt: skip
"""In the order of their colours."""


def comparison(compared: Comparison) -> Section:
    section = Section("comparison", "Comparison")
    section.text.append(f"A is {compared.names[0]}. B is {compared.names[1]}.")
    section.text += [changed(compared), *verdicts(compared)]
    if len(compared.points) > 1:
        section.charts += _of_points(compared)
    else:
        by_name = {figure.name: figure for figure in shown_costs(compared)}
        section.charts.append(_dots("costs of a round, B / A", by_name, "B / A"))
        section.charts += _curves(compared.points[0])
    section.tables += tables(compared)
    return section


def _curves(point: PointPair) -> Iterator[Drawing]:
    """Draw curves of A and B in one chart."""
    task = point.before.first.task
    for name in dict.fromkeys(("accuracy", HEADLINES[task])):
        metric = label_of(name, task)
        axis = Axis(METRICS[name].axis(metric))
        for series, whose in both_series(name).items():
            curves: list[Line] = []
            for side, group in {"A": point.before, "B": point.after}.items():
                curves.append(replace(curve_of(group, series), name=side))
            if max(len(curve.x) for curve in curves) > 1:
                title = f"{metric}: {whose}"
                yield lines(title, curves, Axis("rounds", whole=True), axis)


def _of_points(compared: Comparison) -> Iterator[Drawing]:
    """Draw the seconds and accuracies of all points."""
    points = compared.points
    seconds = {point_name(point): point.seconds for point in points}
    yield _dots(f"{SECONDS_PER_ROUND}, B / A", seconds, "B / A")
    for whole in compared.headlines:
        having: dict[str, Figure] = {}
        for point in points:
            for figure in point.headlines:
                if figure.name == whole.name:
                    having[point_name(point)] = figure
        # A chart of zeros says less than the sentence above it.
        if all(figure.same for figure in having.values()):
            continue
        unit = "points" if whole.unit == "%" else "difference"
        title = f"{whole.name}, B {MINUS} A"
        yield _dots(title, having, unit)


def _dots(title: str, figures: Mapping[str, Figure], unit: str) -> Drawing:
    """Draw a dot for each figure, or for those that differ most."""
    most_first = sorted(figures, key=lambda name: -_distance(figures[name]))
    chosen = set(most_first[:MOST_DOTS])
    if len(chosen) < len(figures):
        title += f": the {len(chosen)} of {len(figures)} points that differ most"
    marks = []
    for name, figure in figures.items():
        if name in chosen:
            change = figure.change
            ends = (change.low, change.high)
            marks.append(Mark(name, change.centre, verdict(figure), *ends))
    neutral = next(iter(figures.values())).neutral
    return rows(title, marks, Axis(unit), line=neutral, order=VERDICTS)


def _distance(figure: Figure) -> float:
    """Return how far a figure is from no change; half counts as much as double."""
    centre = figure.change.centre
    if not figure.neutral:
        return abs(centre)
    return abs(log(centre)) if centre > 0 else inf
