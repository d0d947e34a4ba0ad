"""The results of a study: its verdicts, every point in one row, the best method under
each condition, and attacks compared with honest runs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import isnan

from hpcfed import plugins
from hpcfed.analysis.collect import Found
from hpcfed.analysis.contests import Contest, contests
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
from hpcfed.analysis.groups import Group
from hpcfed.analysis.labels import both_series, condition_text
from hpcfed.analysis.outcomes import known_metric, last_accuracy
from hpcfed.analysis.render.sections.section import Section, points_table
from hpcfed.analysis.statistics import of_seeds
from hpcfed.analysis.swept import Swept
from hpcfed.analysis.verdicts import verdicts as answered
from hpcfed.options.metrics import HEADLINES, label_of
from hpcfed.results.pace import MS_PER_ROUND
from hpcfed.words import DASH

COLUMNS: dict[str, Callable[[Group], Cell]] = {
    # Runs and seeds differ if points were repeated, or seeds stacked in one run.
    "runs": lambda group: COUNT(len(group.processes)),
    "seeds": lambda group: COUNT(len(group.seeds)),
    "columns": lambda group: COUNT(group.columns),
    MS_PER_ROUND: lambda group: MS(group.seconds),
    "clients' last accuracy, %": lambda group: PER_CENT_OF(
        last_accuracy(group, "accuracy")
    ),
    "global model's, %": lambda group: PER_CENT_OF(
        last_accuracy(group, "global_accuracy")
    ),
}


def verdicts(every: Sequence[Group]) -> Section:
    """Show the verdicts, before the figures behind them."""
    section = Section("verdicts", "Verdicts")
    section.verdicts += answered(every)
    section.text.append("Brackets hold 95 % confidence.")
    return section


def overview(every: Sequence[Group], found: Found) -> Section:
    """Show every point in one row."""
    section = Section("overview", "Overview")
    columns: dict[str, Callable[[Group], str | Cell]] = dict(COLUMNS)
    for name, metric in _headlines(every).items():
        titles = (f"clients' last {metric}", f"global model's {metric}")
        for title, series in zip(titles, both_series(name), strict=True):
            columns[title] = partial(_headline, name=name, series=series)
    columns["peak memory of a rank, MiB"] = lambda group: MEBIBYTES(group.peak_memory)
    section.tables.append(points_table(every, columns))
    section.text.append(
        "Ms per round is the median of the rounds after the warm-up, each on its slowest "
        "rank; for several runs, the geometric mean of their medians. Brackets hold 95 % "
        "confidence: by Student's t over runs (for times, on their logarithms), or, for a "
        "single run, between order statistics of its rounds. Charts cut intervals that "
        "reach far beyond the points; tooltips and tables show them whole."
    )
    if any(group.first.stacked_seeds > 1 for group in every):
        section.text.append(
            "Where several runs advanced together, times and memory are of all of them."
        )
    if found.unfinished:
        head = ("not finished", "status", "why")
        section.tables.append(Table(head, found.unfinished, words=True))
    return section


def _headlines(every: Sequence[Group]) -> dict[str, str]:
    """Return the main metrics of tasks that are not judged by accuracy."""
    found = {}
    for group in every:
        name = HEADLINES[group.first.task]
        if name != "accuracy" and name in group.metrics:
            found[name] = label_of(name, group.first.task)
    return found


def _headline(group: Group, name: str, series: str) -> str | Cell:
    # Several tasks may share one table: each has values only for its own metric.
    if name != HEADLINES[group.first.task]:
        return DASH
    return PLAIN(known_metric(name, [run.last(series) for run in group.seeds]))


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
        "paired where seeds are the same, otherwise by Welch's t. Of twenty conditions "
        "without any difference, one would look decided."
    )
    columns = ("condition", "best", "score", "second", "its score", "lead", "verdict")
    section.tables.append(Table(columns, [_contest_row(one) for one in found]))
    return section


def _contest_row(one: Contest) -> Row:
    best, second = one.ranking[:2]
    score = one.judged.kind
    verdict = f"not told apart by {one.seeds} seeds"
    if one.decided:
        verdict = "wins"
    elif one.seeds < 2:
        verdict = "one seed cannot tell"
    return [
        condition_text(one.condition),
        one.entrant(best),
        score(one.judged.estimate(best)),
        one.entrant(second),
        score(one.judged.estimate(second)),
        score(one.leads[0]),
        verdict,
    ]


def attacks(every: Sequence[Group]) -> Section:
    """Show accuracy with and without attackers, by aggregation rule."""
    section = Section("attacks", "Attacks and defences")
    if not any(_attacked(group) or _defended(group) for group in every):
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


def _defended(group: Group) -> bool:
    return str(group.options["aggregation"]) != "mean"


def _attack_row(group: Group) -> Row:
    last, best = [], []
    for run in group.seeds:
        # If a method has no global model, use the clients' own accuracy.
        no_global = isnan(run.last("global_accuracy"))
        series = "accuracy" if no_global else "global_accuracy"
        last.append(run.last(series))
        best.append(run.best(series))
    options = group.options
    return [
        plugins.label(str(options["method"])),
        str(options["attack"]),
        str(options["attackers"]) if _attacked(group) else DASH,
        str(options["aggregation"]),
        COUNT(group.clients),
        COUNT(group.ranks),
        PER_CENT_OF(of_seeds(last, most=1)),
        PER_CENT_OF(of_seeds(best, most=1)),
    ]
