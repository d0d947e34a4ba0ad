"""Time to target: rounds, seconds and bytes until a target accuracy was reached."""

from collections.abc import Sequence
from math import nan
from statistics import fmean

from hpcfed.report.groups import Group
from hpcfed.report.sections.section import (
    MIB,
    WHICH,
    Section,
    Table,
    interval,
    number,
    which,
)
from hpcfed.report.statistics import of_seeds

COLUMNS = (
    *WHICH,
    "target, %",
    "seeds that reached it",
    "rounds",
    "seconds",
    "MiB sent",
)


def target(every: Sequence[Group]) -> Section:
    section = Section("target", "Time to target")
    rows = []
    for group in every:
        if group.first.target is not None:
            rows.append(_row(group))
    if not rows:
        return section
    section.tables.append(Table(COLUMNS, rows))
    section.text.append("Means over the seeds that reached the target accuracy.")
    return section


def _row(group: Group) -> list[str]:
    all_seeds = [run.reached() for run in group.seeds]
    reached = [one for one in all_seeds if one is not None]
    rounds = "–"
    seconds = sent = nan
    # Seeds that did not reach it would need a guess.
    if reached:
        by_seed = [float(one.rounds) for one in reached]
        rounds = interval(of_seeds(by_seed))
        seconds = fmean(one.seconds for one in reached)
        sent = fmean(one.bytes for one in reached)
    return [
        *which(group),
        f"{group.first.target:g}",
        f"{len(reached)} of {len(group.seeds)}",
        rounds,
        number(seconds),
        number(sent / MIB),
    ]
