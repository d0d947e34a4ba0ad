"""What a round costs: seconds by phase, memory, bytes sent, and the server's learning."""

from collections.abc import Sequence
from functools import partial
from statistics import fmean

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
from hpcfed.analysis.labels import ranks_label
from hpcfed.analysis.render.charts import Axis, Line, lines
from hpcfed.analysis.render.sections.section import (
    MOST_LINES,
    Section,
    batches,
    by_key,
    by_key_and_ranks,
    few_bars,
    held_text,
    lying_bars,
    one_size_each,
    points_table,
    stacked_bars,
    ticks,
    which,
)
from hpcfed.analysis.swept import Swept, held
from hpcfed.results.pace import MS_PER_ROUND, PER_ROUND_MEANS
from hpcfed.runtime.timer import PHASES
from hpcfed.words import MIB

SERVER_COLUMNS = (
    "options", "clients", "server ranks", "network", "parameters", "samples per second",
    "of peak, %", "peak memory, MiB", "server's share of the run, %",
)  # fmt: skip


def phases(every: Sequence[Group], options: Sequence[Swept]) -> Section:
    section = Section("phases", "Time of a round by phase")
    section.text.append(
        f"{PER_ROUND_MEANS[0].upper()}{PER_ROUND_MEANS[1:]}. Bars are named clients on "
        "ranks."
    )
    seldom = _seldom(every)
    if seldom:
        section.text.append(
            f"Few rounds go through {' and '.join(seldom)}. The bars leave that out; the "
            "table has its mean over all counted rounds."
        )
    shown = few_bars(every, options)
    section.text += held_text(shown)
    # All groups have the same phases.
    segments = {}
    for phase in every[0].phase_seconds:
        segments[phase] = partial(_phase_milliseconds, phase=phase)
    section.charts += stacked_bars(shown.groups, segments, Axis(MS_PER_ROUND))
    section.tables.append(_phase_table(every))
    return section


def _phase_table(every: Sequence[Group]) -> Table:
    """Return the milliseconds of each point's phases, without phases that took no time
    anywhere.
    """
    columns = {}
    for phase in PHASES:
        if any(_usual(group, phase) for group in every):
            columns[phase] = partial(_phase, phase=phase)
    for phase in _seldom(every):
        columns[f"{phase}, mean"] = partial(_phase_mean, phase=phase)
    return points_table(every, columns, MS_PER_ROUND)


def _phase(group: Group, phase: str) -> Cell:
    return MS(group.phase_seconds[phase])


def _phase_mean(group: Group, phase: str) -> Cell:
    return MS(group.phase_means[phase])


def _usual(group: Group, phase: str) -> bool:
    return group.phase_seconds[phase] > 0


def _seldom(every: Sequence[Group]) -> list[str]:
    """Return phases that only few rounds of some point have: their median is 0."""
    found = []
    for phase in PHASES:
        for group in every:
            if group.phase_means[phase] > 0 and not _usual(group, phase):
                found.append(phase)
                break
    return found


def _phase_milliseconds(group: Group, phase: str) -> float:
    return 1e3 * group.phase_seconds[phase]


def memory(every: Sequence[Group], options: Sequence[Swept]) -> Section:
    section = Section("memory", "Memory")
    section.text.append(
        "Measured in the device's allocator on a GPU, and for the whole process on a CPU."
    )
    whose = "of the rank that has most"
    unit = "peak memory of a rank, MiB"
    if one_size_each(every):
        shown = few_bars(every, options)
        section.text += held_text(shown)
        section.charts += lying_bars(
            shown.groups,
            {whose: _peak_mib},
            Axis(unit),
        )
        return section
    # Over clients, one line for each number of ranks.
    shown = held(every, options, keep=("clients",), most=MOST_LINES)
    section.text += held_text(shown)
    peaks_by_clients = []
    for (key, ranks), members in by_key_and_ranks(shown.groups).items():
        clients = [float(group.clients) for group in members]
        peaks = [_peak_mib(group) for group in members]
        name = ranks_label(key, ranks)
        peaks_by_clients.append(Line(name, clients, peaks))
    for some in batches(peaks_by_clients, MOST_LINES):
        x = Axis("clients", log=True, ticks=ticks(some))
        y = Axis(unit, zero=True)
        section.charts.append(lines(f"peak memory {whose}", some, x, y))
    return section


def _peak_mib(group: Group) -> float:
    return group.peak_memory / MIB


def sent(every: Sequence[Group]) -> Section:
    """Show the bytes exchanged between clients and the server."""
    section = Section("bytes", "Bytes")
    columns = {
        "up, MiB per round": lambda group: MEBIBYTES(group.per_round("bytes_up")),
        "down, MiB per round": lambda group: MEBIBYTES(group.per_round("bytes_down")),
        "both, MiB in all": lambda group: MEBIBYTES(_sent_in_all(group)),
    }
    caption = "by the methods' own accounting"
    section.tables.append(points_table(every, columns, caption))
    return section


def _sent_in_all(group: Group) -> float:
    """Return the bytes of all rounds of a run, up and down."""
    total = 0.0
    for run in group.seeds:
        total += float(run.rounds["bytes_up"].sum() + run.rounds["bytes_down"].sum())
    # Per run, since seeds may have stopped after different numbers of rounds.
    return total / len(group.seeds)


def server(every: Sequence[Group], options: Sequence[Swept]) -> Section:
    """Show what the training of the server's model took, and how fast it was."""
    section = Section("server", "Server")
    members = [group for group in every if group.first.learnings]
    if not members:
        return section
    # Runs of different versions may name their phases differently.
    phases = _learning_phases(members)
    segments = {name: partial(_learning_seconds, phase=name) for name in phases}
    shown = few_bars(members, options)
    section.text += held_text(shown)
    learning = Axis("seconds of learning")
    section.charts += stacked_bars(shown.groups, segments, learning)
    rows: list[Row] = []
    for family in by_key(members).values():
        for group in family:
            rows += _network_rows(group, phases)
    section.tables.append(Table(SERVER_COLUMNS, rows))
    section.text.append(
        "Bars are named clients on ranks. The share of the peak is known only for GPUs."
    )
    return section


def _learning_phases(members: Sequence[Group]) -> list[str]:
    """Return the phases of all runs, in order of first appearance."""
    names: dict[str, None] = {}
    for group in members:
        for run in group.runs:
            for learning in run.learnings:
                names |= dict.fromkeys(learning.seconds)
    return list(names)


def _learning_seconds(group: Group, phase: str) -> float:
    """Return the seconds of a phase over all trainings of the server's model, for all
    seeds of a process, as the mean over processes.
    """
    totals = []
    for process in group.processes:
        total = 0.0
        for run in process.runs:
            for learning in run.learnings:
                total += learning.seconds.get(phase, 0.0)
        totals.append(total)
    return fmean(totals)


def _network_rows(group: Group, phases: Sequence[str]) -> list[Row]:
    """Return a row for each of the server's networks, from its last training."""
    # The last training represents all: the first one also warms up.
    last = group.first.learnings[-1]
    seconds = sum(_learning_seconds(group, phase) for phase in phases)
    whole = fmean(
        float(process.runs[0].rounds["seconds"].sum()) for process in group.processes
    )
    name, clients, _ = which(group)
    rows: list[Row] = []
    for network, parameters in last.parameters.items():
        rows.append(
            [
                name,
                clients,
                str(group.options.get("server_ranks", 0)),
                network,
                COUNT(parameters),
                PLAIN(last.samples_per_second[network]),
                PER_CENT_OF(last.utilisation[network]),
                # These two belong to the server as a whole, so they are the same for
                # all its networks.
                MEBIBYTES(float(last.peak_memory.max())),
                PER_CENT_OF(seconds / whole),
            ]
        )
    return rows
