"""Attacks and defences: accuracy with and without attackers, by rule of aggregation."""

from collections.abc import Sequence
from math import isnan

from hpcfed import plugins
from hpcfed.analysis.findings import Table
from hpcfed.analysis.groups import Group
from hpcfed.analysis.render.sections.section import Section
from hpcfed.analysis.statistics import of_seeds
from hpcfed.words import interval

COLUMNS = (
    "method",
    "attack",
    "attackers",
    "aggregation",
    "clients",
    "ranks",
    "last accuracy, %",
    "best, %",
)


def attacks(every: Sequence[Group]) -> Section:
    section = Section("attacks", "Attacks and defences")
    concerned = [group for group in every if _attacked(group) or _defended(group)]
    if not concerned:
        return section
    # All groups, because an attack means little without the honest run beside it.
    rows = [_row(group) for group in every]
    caption = "runs without attackers stand beside"
    section.tables.append(Table(COLUMNS, rows, caption))
    return section


def _attacked(group: Group) -> bool:
    return str(group.options.get("attack", "none")) != "none"


def _defended(group: Group) -> bool:
    return str(group.options["aggregation"]) != "mean"


def _row(group: Group) -> list[str]:
    last, best = [], []
    for run in group.seeds:
        # The clients' own accuracy stands in where a method has no global model.
        no_global = isnan(run.last("global_accuracy"))
        series = "accuracy" if no_global else "global_accuracy"
        last.append(run.last(series))
        best.append(run.best(series))
    options = group.options
    return [
        plugins.label(str(options["method"])),
        str(options["attack"]),
        str(options["attackers"]) if _attacked(group) else "–",
        str(options["aggregation"]),
        f"{group.clients:,}",
        str(group.ranks),
        interval(of_seeds(last, most=1), 100),
        interval(of_seeds(best, most=1), 100),
    ]
