"""The results of a study: its verdicts, every point in one row, the best method under
each condition, what the options do, and attacks compared with honest runs.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from math import isnan

from hpcfed import plugins
from hpcfed.analysis.choices import SIZES
from hpcfed.analysis.collect import Found
from hpcfed.analysis.contests import contests
from hpcfed.analysis.findings import (
    COUNT,
    MEBIBYTES,
    MS,
    PER_CENT_OF,
    PLAIN,
    Cell,
    Row,
    Table,
)
from hpcfed.analysis.groups import Group, fewest_ranks
from hpcfed.analysis.labels import (
    ACCURACIES,
    both_series,
    condition_text,
    label,
    value_text,
)
from hpcfed.analysis.outcomes import last_metric, measure
from hpcfed.analysis.render.charts import Axis, Drawing, Line, Mark, lines, rows, spread
from hpcfed.analysis.render.sections.section import (
    LOG_SPREAD,
    MOST_LINES,
    Section,
    estimates_line,
    points_table,
)
from hpcfed.analysis.statistics import Estimate, of_seeds
from hpcfed.analysis.swept import Effect, Held, Swept, effects, families, held
from hpcfed.analysis.verdicts import verdicts as answered
from hpcfed.options.metrics import HEADLINES, label_of
from hpcfed.results.pace import MS_PER_ROUND
from hpcfed.results.study import StudyRecord
from hpcfed.words import DASH


def verdicts(every: Sequence[Group], studies: Sequence[StudyRecord] = ()) -> Section:
    """Show the verdicts, before the figures behind them."""
    section = Section("verdicts", "Verdicts")
    section.verdicts += answered(every, studies)
    section.text.append("Brackets hold 95 % confidence.")
    return section


def overview(every: Sequence[Group], found: Found) -> Section:
    """Show every point in one row."""
    section = Section("overview", "Overview")
    accuracies = []
    for series in ACCURACIES:
        accuracies.append([PER_CENT_OF(last_metric(one, series)) for one in every])
    columns: dict[str, Sequence[str | Cell]] = {
        # Runs and seeds differ if points were repeated, or seeds stacked in one run.
        "runs": [COUNT(len(group.processes)) for group in every],
        "seeds": [COUNT(len(group.seeds)) for group in every],
        "columns": [COUNT(group.columns) for group in every],
        MS_PER_ROUND: [MS(group.seconds) for group in every],
        "clients' last accuracy, %": accuracies[0],
        "global model's, %": accuracies[1],
    }
    # Tasks that are not judged by accuracy have another main metric.
    headlines = {}
    for group in every:
        name = HEADLINES[group.first.task]
        if name != "accuracy" and name in group.metrics:
            headlines[name] = label_of(name, group.first.task)
    for name, metric in headlines.items():
        titles = (f"clients' last {metric}", f"global model's {metric}")
        for title, series in zip(titles, both_series(name), strict=True):
            cells: list[str | Cell] = []
            for group in every:
                # Several tasks may share one table, each with its own metric.
                known = name == HEADLINES[group.first.task]
                cells.append(PLAIN(last_metric(group, series)) if known else DASH)
            columns[title] = cells
    peaks = [MEBIBYTES(group.peak_memory) for group in every]
    columns["peak memory of a rank, MiB"] = peaks
    section.tables.append(points_table(every, columns))
    section.text.append(
        "Ms per round is the median of the rounds after the warm-up, each on its slowest "
        "rank; for several runs, the geometric mean of their medians. Brackets hold 95 % "
        "confidence: by Student's t over runs (for times, on their logarithms), or, for a "
        "single run, between order statistics of its rounds. Charts cut intervals that "
        "reach far beyond the points; tooltips and tables show them whole."
    )
    if any(group.options["stacked_seeds"] > 1 for group in every):
        section.text.append(
            "Where several runs advanced together, times and memory are of all of them."
        )
    if found.unfinished:
        head = ("not finished", "status", "why")
        section.tables.append(Table(head, found.unfinished, words=True))
    return section


def methods(every: Sequence[Group], options: Sequence[Swept]) -> Section:
    """Show which method is best under which condition, and if the seeds support it."""
    section = Section("methods", "Which method wins where")
    found = contests(every, options)
    if not found:
        return section
    judged = sorted({f"{one.judged.axis} ({one.judged.whose})" for one in found})
    section.text.append(
        f"Methods under equal conditions, judged by their last {', '.join(judged)}. A "
        "method wins where the 95 % intervals of its leads over all others are above 0: "
        "paired where seeds are the same, otherwise by Welch's t. Even if no method "
        "differed at all, about one condition in twenty would look decided."
    )
    columns = ("condition", "best", "score", "second", "its score", "lead", "verdict")
    rows: list[Row] = []
    for one in found:
        verdict = f"not told apart by {one.seeds} seeds"
        if one.decided:
            verdict = "wins"
        elif one.seeds < 2:
            verdict = "one seed cannot tell"
        if one.besides:
            verdict += f"; they differ in {', '.join(one.besides)}, too"
        cells: list[str | Cell] = [condition_text(one.condition)]
        for group in one.ranking[:2]:
            cells += [one.entrant(group), one.judged.kind(one.judged.estimate(group))]
        rows.append([*cells, one.judged.kind(one.leads[0]), verdict])
    section.tables.append(Table(columns, rows))
    return section


def attacks(every: Sequence[Group]) -> Section:
    """Show accuracy with and without attackers, by aggregation rule."""
    section = Section("attacks", "Attacks and defences")
    aggregations = {str(group.options["aggregation"]) for group in every}
    if not any(map(_attacked, every)) and aggregations == {"mean"}:
        return section
    columns = ("method", "attack", "attackers", "aggregation", "clients", "ranks",
               "last accuracy, %", "best, %")  # fmt: skip
    # All groups, because an attack means little without the honest run beside it.
    rows = [_attack_row(group) for group in every]
    caption = "with runs without attackers, for comparison"
    section.tables.append(Table(columns, rows, caption))
    return section


def _attacked(group: Group) -> bool:
    return str(group.options.get("attack", "none")) != "none"


def _attack_row(group: Group) -> Row:
    last, best = [], []
    for run in group.seeds:
        # If a method has no global model, use the clients' own accuracy.
        no_global = isnan(run.last("global_accuracy"))
        series = "accuracy" if no_global else "global_accuracy"
        last.append(run.last(series))
        best.append(run.best(series))
    options = group.options
    attackers = str(options["attackers"]) if _attacked(group) else DASH
    about = [plugins.label(str(options["method"])), str(options["attack"]), attackers]
    sizes = [COUNT(group.clients), COUNT(group.ranks)]
    reached = [PER_CENT_OF(of_seeds(values, most=1)) for values in (last, best)]
    return [*about, str(options["aggregation"]), *sizes, *reached]


# Swept options: score and time over each of them.

MOST_CHARTS = 16
"""Most charts in this section; the options with the least effect have none."""
OPTION_COLUMNS = (
    "option", "values", "best score with", "worst with", "difference", "pairs",
    "fastest with", "slowest with", "times as long", "pairs",
)  # fmt: skip


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
        "over pairs of points that differ in nothing else, or in what stands beside it."
    )
    left_out = []
    for one in strongest:
        drawn = list(_option_charts(every, one.option, found))
        if len(section.charts) + len(drawn) > MOST_CHARTS:
            left_out.append(one.option.name)
        else:
            section.charts += drawn
    if left_out:
        section.text.append(
            f"Not drawn, because they matter least: {', '.join(left_out)}. The CSV has "
            "all points (hpcfed report --csv)."
        )
    rows: list[Row] = []
    for one in strongest:
        # An option without pairs has no measurable effect.
        if one.score or one.time:
            name = one.option.name
            values = ", ".join(value_text(value) for value in one.option.values)
            both = [effect.besides for effect in (one.score, one.time) if effect]
            if others := sorted(set().union(*both)):
                name += f", and {', '.join(others)}"
            rows.append([name, values, *_cells(one.score), *_cells(one.time)])
    if rows:
        section.tables.append(Table(OPTION_COLUMNS, rows))
    return section


def _cells(effect: Effect | None) -> Row:
    if effect is None:
        return [DASH] * 4
    best, worst = value_text(effect.best), value_text(effect.worst)
    return [best, worst, PLAIN(effect.change), COUNT(effect.pairs)]


def _option_charts(
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
            # Ranks do not matter here: any point represents all of them.
            others = [one for one in found if one.name != "ranks"]
            series = _series(shown, option, others)
            scores = {name: list(map(judged.estimate, series[name])) for name in series}
            title = f"{judged.name} over {option.name}{about}{_held(shown)}"
            yield from _drawing(title, option, series, scores, Axis(judged.axis))
        # Clients and ranks have their own sections.
        if option.name not in SIZES:
            shown = held(members, found, keep=(option.name,), most=MOST_LINES)
            series = _series(shown, option, found)
            times = {}
            for name, alike in series.items():
                times[name] = [group.seconds.scaled(1e3) for group in alike]
            centres = [one.centre for values in times.values() for one in values]
            axis = Axis(MS_PER_ROUND, log=spread(centres) > LOG_SPREAD, zero=True)
            title = f"time of a round over {option.name}{about}{_held(shown)}"
            yield from _drawing(title, option, series, times, axis)


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
    return f" at {label(shown.options)}" if shown.options else ""


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
