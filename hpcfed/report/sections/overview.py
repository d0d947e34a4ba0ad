"""Overview: every choice of options in one row."""

from collections.abc import Sequence

from hpcfed.report.collect import Found
from hpcfed.report.groups import Group
from hpcfed.report.labels import ACCURACIES
from hpcfed.report.sections.accuracy import last_accuracy
from hpcfed.report.sections.section import WHICH, Section, Table, interval, which


def overview(every: Sequence[Group], found: Found) -> Section:
    section = Section("overview", "Overview")
    # Runs and seeds differ where points were repeated, or seeds stacked in one run.
    rows = []
    for group in every:
        counts = [
            str(len(group.samples)),
            str(len(group.seeds)),
            f"{group.columns:,}",
        ]
        accuracies = [last_accuracy(group, name) for name in ACCURACIES]
        rows.append([
            *which(group), *counts, interval(group.seconds, 1e3),
            *(interval(accuracy, 100) for accuracy in accuracies),
        ])  # fmt: skip
    columns = (*WHICH, "runs", "seeds", "columns", "ms per round",
               "clients' last accuracy, %", "global model's, %")  # fmt: skip
    section.tables.append(Table(columns, rows))
    section.text.append(
        "Times are those of the slowest rank, without warm-up rounds. Brackets hold "
        "95 % confidence: by Student's t over runs (for times, on their logarithms), or "
        "between order statistics of the rounds where there is one run. Charts cut "
        "intervals that reach far beyond the points; tooltips and tables show them whole."
    )
    if any(group.first.stacked_seeds > 1 for group in every):
        section.text.append(
            "Where several seeds advanced together, times and memory are of all of them."
        )
    if found.unfinished:
        head = ("not finished", "status", "why")
        section.tables.append(Table(head, found.unfinished, words=True))
    return section
