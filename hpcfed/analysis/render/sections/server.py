"""The server's model: what its training took, and how fast it was."""

from collections.abc import Sequence
from functools import partial
from statistics import fmean

from hpcfed.analysis.findings import Table
from hpcfed.analysis.groups import Group
from hpcfed.analysis.labels import label
from hpcfed.analysis.render.charts import Axis
from hpcfed.analysis.render.sections.section import (
    Section,
    by_key,
    few_bars,
    held_text,
    stacked_bars,
)
from hpcfed.analysis.swept import Swept
from hpcfed.words import MIB, number

COLUMNS = (
    "options", "clients", "server ranks", "network", "parameters", "samples per second",
    "of peak, %", "peak memory, MiB", "server's share of the run, %",
)  # fmt: skip


def server(every: Sequence[Group], options: Sequence[Swept]) -> Section:
    section = Section("server", "Server")
    members = [group for group in every if group.first.learnings]
    if not members:
        return section
    # Runs of several versions may name their phases differently.
    phases = _phases(members)
    segments = {name: partial(_phase_seconds, phase=name) for name in phases}
    shown = few_bars(members, options)
    section.text += held_text(shown)
    learning = Axis("seconds of learning")
    section.charts += stacked_bars(shown.groups, segments, learning)
    rows = []
    for family in by_key(members).values():
        for group in family:
            rows += _network_rows(group, phases)
    section.tables.append(Table(COLUMNS, rows))
    section.text.append(
        "Bars are named clients on ranks. The share of the peak is known only for GPUs."
    )
    return section


def _phases(members: Sequence[Group]) -> list[str]:
    """Return the phases of all runs, in the order in which they are first met."""
    names: dict[str, None] = {}
    for group in members:
        for run in group.runs:
            for learning in run.learnings:
                names |= dict.fromkeys(learning.seconds)
    return list(names)


def _phase_seconds(group: Group, phase: str) -> float:
    """Return seconds of a phase over all times that the server's model was trained, for
    all seeds of a process; the mean over processes.
    """
    totals = []
    for process in group.processes:
        total = 0.0
        for run in process.runs:
            for learning in run.learnings:
                total += learning.seconds.get(phase, 0.0)
        totals.append(total)
    return fmean(totals)


def _network_rows(group: Group, phases: Sequence[str]) -> list[list[str]]:
    """Return a row for each of the server's networks, as it was trained last."""
    # The last time stands for all: the first one also warms up.
    last = group.first.learnings[-1]
    seconds = sum(_phase_seconds(group, phase) for phase in phases)
    whole = fmean(
        float(process.runs[0].rounds["seconds"].sum()) for process in group.processes
    )
    server_ranks = str(group.options.get("server_ranks", 0))
    name = label(group.key)
    which = [name, f"{group.clients:,}", server_ranks]
    memory = number(float(last.peak_memory.max()) / MIB)
    share = number(100 * seconds / whole)
    # Memory and share are the server's as a whole, alike for all its networks.
    rows = []
    for network, parameters in last.parameters.items():
        rate = number(last.samples_per_second[network])
        of_peak = number(100 * last.utilisation[network])
        about = [network, f"{parameters:,}", rate, of_peak]
        rows.append(
            [
                *which,
                *about,
                memory,
                share,
            ]
        )
    return rows
