"""Swept options: score and time over each of them."""

from collections.abc import Iterator, Sequence
from itertools import islice

from hpcfed import plugins
from hpcfed.analysis.choices import SIZES
from hpcfed.analysis.findings import COUNT, PLAIN, Row, Table
from hpcfed.analysis.groups import Group, fewest_ranks
from hpcfed.analysis.labels import label, option_text, value_text
from hpcfed.analysis.outcomes import Measure, measure
from hpcfed.analysis.render.charts import Axis, Drawing, Line, Mark, lines, rows, spread
from hpcfed.analysis.render.sections.section import (
    LOG_SPREAD,
    MOST_LINES,
    Section,
    estimates_line,
)
from hpcfed.analysis.statistics import Estimate
from hpcfed.analysis.swept import Effect, Held, Matters, Swept, effects, families, held
from hpcfed.results.pace import MS_PER_ROUND
from hpcfed.words import DASH

MOST_CHARTS = 16
"""Most charts in this section; the options with the least effect have none."""
COLUMNS = (
    "option",
    "values",
    "best score with",
    "worst with",
    "difference",
    "pairs",
    "fastest with",
    "slowest with",
    "times as long",
    "pairs",
)


def options(every: Sequence[Group], found: Sequence[Swept]) -> Section:
    """Show score and time over each swept option."""
    section = Section("options", "What the options do")
    strongest = effects(every, found)
    if not strongest:
        return section
    judged = measure(every)
    what = "score" if judged is None else f"{judged.axis} ({judged.whose})"
    section.text.append(
        f"Score is the last {what}. Bars are 95 % confidence over seeds, for times over "
        "runs. The table compares the two values of an option that are furthest apart, "
        "over pairs of points that differ in nothing else."
    )
    left_out = []
    for one in strongest:
        drawn = list(_charts(every, one.option, found))
        if len(section.charts) + len(drawn) > MOST_CHARTS:
            left_out.append(one.option.name)
        else:
            section.charts += drawn
    if left_out:
        section.text.append(
            f"Without a chart here, because they matter least: {', '.join(left_out)}. "
            "hpcfed report --csv has all points."
        )
    # An option without pairs has no measurable effect.
    told = [one for one in strongest if one.score or one.time]
    if told:
        section.tables.append(Table(COLUMNS, [_row(one) for one in told]))
    return section


def _row(one: Matters) -> Row:
    values = ", ".join(value_text(value) for value in one.option.values)
    return [one.option.name, values, *_cells(one.score), *_cells(one.time)]


def _cells(effect: Effect | None) -> Row:
    if effect is None:
        return [DASH] * 4
    best, worst = value_text(effect.best), value_text(effect.worst)
    return [best, worst, PLAIN(effect.change), COUNT(effect.pairs)]


def _charts(
    every: Sequence[Group], option: Swept, found: Sequence[Swept]
) -> Iterator[Drawing]:
    """Draw score and time over an option, separately for each data set."""
    datasets: dict[str, list[Group]] = {}
    for group in every:
        # Data sets have separate charts, unless they are the swept option.
        where = "" if option.name == "dataset" else str(group.options["dataset"])
        datasets.setdefault(where, []).append(group)
    for where, members in datasets.items():
        about = f", {plugins.label(where)}" if len(datasets) > 1 else ""
        judged = measure(members)
        if judged is not None and option.name != "ranks":
            fewest = fewest_ranks(members)
            shown = held(fewest, found, keep=(option.name, "ranks"), most=MOST_LINES)
            yield from _scores(shown, option, found, judged, about)
        # Clients and ranks have their own sections.
        if option.name not in SIZES:
            shown = held(members, found, keep=(option.name,), most=MOST_LINES)
            yield from _times(shown, option, found, about)


def _scores(
    shown: Held, option: Swept, found: Sequence[Swept], judged: Measure, about: str
) -> Iterator[Drawing]:
    # Ranks do not matter here: any point represents all of them.
    others = [one for one in found if one.name != "ranks"]
    series = _series(shown, option, others)
    estimates = {
        name: [judged.estimate(group) for group in members]
        for name, members in series.items()
    }
    title = f"{judged.name} over {option.name}{about}{_held(shown)}"
    yield from _drawing(title, option, series, estimates, Axis(judged.axis))


def _times(
    shown: Held, option: Swept, found: Sequence[Swept], about: str
) -> Iterator[Drawing]:
    series = _series(shown, option, found)
    estimates = {
        name: [_milliseconds(group.seconds) for group in members]
        for name, members in series.items()
    }
    centres = [one.centre for values in estimates.values() for one in values]
    axis = Axis(MS_PER_ROUND, log=spread(centres) > LOG_SPREAD, zero=True)
    title = f"time of a round over {option.name}{about}{_held(shown)}"
    yield from _drawing(title, option, series, estimates, axis)


def _milliseconds(seconds: Estimate) -> Estimate:
    return Estimate(1e3 * seconds.centre, 1e3 * seconds.low, 1e3 * seconds.high)


def _series(
    shown: Held, option: Swept, found: Sequence[Swept]
) -> dict[str, list[Group]]:
    """Return the points of each line, by its name: the options that are not held."""
    series = {}
    # The title already names the data set.
    hidden = () if option.name == "dataset" else ("dataset",)
    alike = families(shown.groups, option.name, found)
    # There may be more methods than a chart can show.
    for choice, members in islice(alike.items(), MOST_LINES):
        name = label(choice.without(*shown.options, *hidden))
        series[name] = members
    return series


def _held(shown: Held) -> str:
    """Return ` at lr 0.1`: the options that are held and do not vary between lines."""
    words = [option_text(name, value) for name, value in shown.options.items()]
    return f" at {', '.join(words)}" if words else ""


def _drawing(
    title: str,
    option: Swept,
    series: dict[str, list[Group]],
    estimates: dict[str, list[Estimate]],
    y: Axis,
) -> Iterator[Drawing]:
    """Draw a line over numbers, or rows of marks over words."""
    if not series:
        return
    # A line through two points adds nothing, and hides their intervals.
    if option.numeric and len(option.values) > 2:
        drawn: list[Line] = []
        for name, members in series.items():
            x = [float(group.options[option.name]) for group in members]
            drawn.append(estimates_line(name, x, estimates[name]))
        values = [float(value) for value in option.values]
        axis = Axis(option.name, log=option.geometric, ticks=values)
        yield lines(title, drawn, axis, y)
        return
    marks = []
    for value in option.values:
        for name, members in series.items():
            for group, estimate in zip(members, estimates[name], strict=True):
                if group.options[option.name] == value:
                    row = value_text(value)
                    ends = (estimate.low, estimate.high)
                    marks.append(Mark(row, estimate.centre, name, *ends))
    yield rows(title, marks, y)
