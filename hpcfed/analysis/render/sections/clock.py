"""Virtual time: accuracy by the clients' clock, and who arrived."""

from collections.abc import Callable, Sequence
from functools import partial
from math import isnan, nan
from statistics import fmean

import numpy as np

from hpcfed.analysis.findings import Table
from hpcfed.analysis.groups import Group
from hpcfed.analysis.outcomes import run_virtual_seconds
from hpcfed.analysis.render.sections.section import WHICH, Section, which
from hpcfed.analysis.render.sections.spending import READING, Expense, add_charts
from hpcfed.analysis.swept import Swept
from hpcfed.results.run import RunRecord
from hpcfed.words import number, time_text


def _virtual_seconds(run: RunRecord) -> np.ndarray:
    return run.rounds["virtual_seconds"]


VIRTUAL_TIME = Expense(
    "virtual time",
    _virtual_seconds,
    units=(("s", 1.0), ("min", 60.0), ("h", 3600.0)),
)


def clock(every: Sequence[Group], options: Sequence[Swept]) -> Section:
    """Show what the virtual clock says, of runs that have one."""
    section = Section("virtual-time", "Accuracy over virtual time")
    clocked = [group for group in every if group.first.has_clock]
    if not clocked:
        return section
    section.text.append(
        "Virtual time is that of the simulated devices and links. It has nothing to do "
        f"with the seconds that the simulation took. {READING}"
    )
    add_charts(section, clocked, options, VIRTUAL_TIME)
    section.tables.append(_table(clocked))
    return section


def _table(clocked: Sequence[Group]) -> Table:
    """Return times, and who arrived and how stale, where somebody knows."""
    columns: dict[str, Callable[[Group], str]] = {
        "virtual time": _in_all,
        "a round": _of_a_round,
    }
    if any(not isnan(_arrived(group)) for group in clocked):
        columns["arrived, %"] = lambda group: number(100 * _arrived(group))
    if any(not isnan(_staleness(group)) for group in clocked):
        columns["versions behind"] = lambda group: number(_staleness(group))
    rows = []
    for group in clocked:
        rows.append([*which(group), *(cell(group) for cell in columns.values())])
    return Table((*WHICH, *columns), rows, "means over seeds")


def _in_all(group: Group) -> str:
    return time_text(run_virtual_seconds(group).centre)


def _of_a_round(group: Group) -> str:
    return time_text(_mean_of_seeds(group, _round_seconds))


def _round_seconds(run: RunRecord) -> float:
    return run.last("virtual_seconds") / run.rounds_done


def _arrived(group: Group) -> float:
    return _mean_of_seeds(group, RunRecord.arrived_share)


def _staleness(group: Group) -> float:
    return _mean_of_seeds(group, partial(RunRecord.mean, name="staleness"))


def _mean_of_seeds(group: Group, figure: Callable[[RunRecord], float]) -> float:
    """Return the mean over seeds that know a figure; NaN where none does."""
    values = [figure(run) for run in group.seeds]
    known = [value for value in values if not isnan(value)]
    return fmean(known) if known else nan
