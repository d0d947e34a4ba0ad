"""Time to target: rounds, seconds by both clocks, and bytes until a target accuracy was
reached.
"""

from collections.abc import Sequence
from math import nan
from statistics import fmean

from hpcfed.analysis.findings import Table
from hpcfed.analysis.groups import Group
from hpcfed.analysis.render.sections.section import WHICH, Section, which
from hpcfed.analysis.statistics import of_seeds
from hpcfed.words import MIB, interval, number, time_text

COLUMNS = (
    *WHICH,
    "target, %",
    "seeds that reached it",
    "rounds",
    "seconds",
    "MiB sent",
)
VIRTUAL = "virtual time"
"""The last column, where some run has a virtual clock."""


def target(every: Sequence[Group]) -> Section:
    section = Section("target", "Time to target")
    rows = []
    for group in every:
        if group.first.target is not None:
            rows.append(_row(group))
    if not rows:
        return section
    section.text.append("Means over the seeds that reached the target accuracy.")
    columns: tuple[str, ...] = COLUMNS
    if any(group.first.has_clock for group in every):
        columns = (*COLUMNS, VIRTUAL)
        section.text.append(
            "Seconds are the simulation's; virtual time is the clients'."
        )
    # A row has a cell for the virtual clock in any case.
    cut = [row[: len(columns)] for row in rows]
    section.tables.append(Table(columns, cut))
    return section


def _row(group: Group) -> list[str]:
    all_seeds = [run.reached() for run in group.seeds]
    reached = [one for one in all_seeds if one is not None]
    rounds = "–"
    seconds = sent = virtual = nan
    # Seeds that did not reach it would need a guess.
    if reached:
        by_seed = [float(one.rounds) for one in reached]
        rounds = interval(of_seeds(by_seed))
        seconds = fmean(one.seconds for one in reached)
        sent = fmean(one.bytes for one in reached)
        virtual = fmean(one.virtual_seconds for one in reached)
    return [
        *which(group),
        f"{group.first.target:g}",
        f"{len(reached)} of {len(group.seeds)}",
        rounds,
        number(seconds),
        number(sent / MIB),
        time_text(virtual),
    ]
