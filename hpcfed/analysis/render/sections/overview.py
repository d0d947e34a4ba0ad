"""Overview: every choice of options in one row."""

from collections.abc import Sequence

from hpcfed.analysis.collect import Found
from hpcfed.analysis.findings import Table
from hpcfed.analysis.groups import Group
from hpcfed.analysis.labels import ACCURACIES, both_series
from hpcfed.analysis.outcomes import known_metric, last_accuracy
from hpcfed.analysis.render.sections.section import WHICH, Section, which
from hpcfed.options.metrics import HEADLINES, label_of
from hpcfed.results.pace import MS_PER_ROUND
from hpcfed.words import MIB, interval, number


def overview(every: Sequence[Group], found: Found) -> Section:
    section = Section("overview", "Overview")
    headlines = _headlines(every)
    # Runs and seeds differ where points were repeated, or seeds stacked in one run.
    rows = []
    for group in every:
        counts = [
            str(len(group.processes)),
            str(len(group.seeds)),
            f"{group.columns:,}",
        ]
        accuracies = [last_accuracy(group, name) for name in ACCURACIES]
        rows.append([
            *which(group), *counts, interval(group.seconds, 1e3),
            *(interval(accuracy, 100) for accuracy in accuracies),
            *_headline_cells(group, headlines), number(group.peak_memory / MIB),
        ])  # fmt: skip
    columns = (*WHICH, "runs", "seeds", "columns", MS_PER_ROUND,
               "clients' last accuracy, %", "global model's, %",
               *_headline_columns(headlines), "peak memory of a rank, MiB")  # fmt: skip
    section.tables.append(Table(columns, rows))
    section.text.append(
        "Ms per round is the median of the rounds that count, all but the first to warm "
        "up, each on its slowest rank; of several runs, the geometric mean of their "
        "medians. Brackets hold 95 % confidence: by Student's t over runs (for times, on "
        "their logarithms), or between order statistics of the rounds where there is one "
        "run. Charts cut intervals that reach far beyond the points; tooltips and tables "
        "show them whole."
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
    """Return the main metrics of tasks that are not judged by their accuracy."""
    found = {}
    for group in every:
        name = HEADLINES[group.first.task]
        if name != "accuracy" and name in group.metrics:
            found[name] = label_of(name, group.first.task)
    return found


def _headline_columns(headlines: dict[str, str]) -> list[str]:
    columns = []
    for metric in headlines.values():
        columns += [f"clients' last {metric}", "global model's"]
    return columns


def _headline_cells(group: Group, headlines: dict[str, str]) -> list[str]:
    cells = []
    for name in headlines:
        for series in both_series(name):
            # The task's own, where several tasks stand in one table.
            own = name == HEADLINES[group.first.task]
            last = [run.last(series) for run in group.seeds]
            cells.append(interval(known_metric(name, last)) if own else "–")
    return cells
