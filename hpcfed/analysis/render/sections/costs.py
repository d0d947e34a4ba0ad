"""What a round costs: seconds by phase, memory, bytes sent, and the server's learning."""

from collections.abc import Sequence
from statistics import fmean

from hpcfed.analysis.choices import grouped
from hpcfed.analysis.findings import (
    COUNT,
    MEBIBYTES,
    MS,
    PER_CENT_OF,
    PLAIN,
    Row,
    Table,
)
from hpcfed.analysis.groups import Group
from hpcfed.analysis.labels import ranks_label
from hpcfed.analysis.render.charts import Axis, Line
from hpcfed.analysis.render.sections.section import (
    MOST_LINES,
    Section,
    by_key,
    few_bars,
    held_text,
    line_charts,
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
    usual = []
    seldom = []
    for phase in PHASES:
        if any(group.phase_seconds[phase] > 0 for group in every):
            usual.append(phase)
        # The median is 0 if only few rounds go through a phase.
        if any(
            group.phase_means[phase] > 0 >= group.phase_seconds[phase]
            for group in every
        ):
            seldom.append(phase)
    if seldom:
        section.text.append(
            f"Few rounds go through {' and '.join(seldom)}. The bars leave that out; the "
            "table has its mean over all counted rounds."
        )
    shown = few_bars(every, options)
    section.text += held_text(shown)
    section.charts += stacked_bars(
        shown.groups,
        lambda group: {name: 1e3 * of for name, of in group.phase_seconds.items()},
        Axis(MS_PER_ROUND),
    )
    columns = {
        phase: [MS(group.phase_seconds[phase]) for group in every] for phase in usual
    }
    for phase in seldom:
        columns[f"{phase}, mean"] = [MS(group.phase_means[phase]) for group in every]
    section.tables.append(points_table(every, columns, MS_PER_ROUND))
    return section


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
            shown.groups, lambda group: {whose: group.peak_memory / MIB}, Axis(unit)
        )
        return section
    # Over clients, one line for each number of ranks.
    shown = held(every, options, keep=("clients",), most=MOST_LINES)
    section.text += held_text(shown)
    families = grouped(shown.groups, lambda group: (group.key, group.ranks))
    peaks_by_clients = []
    for (key, ranks), members in families.items():
        clients = [float(group.clients) for group in members]
        peaks = [group.peak_memory / MIB for group in members]
        peaks_by_clients.append(Line(ranks_label(key, ranks), clients, peaks))
    x = Axis("clients", log=True, ticks=ticks(peaks_by_clients))
    y = Axis(unit, zero=True)
    section.charts += line_charts(f"peak memory {whose}", peaks_by_clients, x, y)
    return section


def sent(every: Sequence[Group]) -> Section:
    """Show the bytes exchanged between clients and the server."""
    totals = []
    for group in every:
        total = 0.0
        for run in group.seeds:
            total += float(
                run.rounds["bytes_up"].sum() + run.rounds["bytes_down"].sum()
            )
        # Per run, since seeds may have stopped after different numbers of rounds.
        totals.append(MEBIBYTES(total / len(group.seeds)))
    columns = {
        "up, MiB per round": [
            MEBIBYTES(group.per_round("bytes_up")) for group in every
        ],
        "down, MiB per round": [
            MEBIBYTES(group.per_round("bytes_down")) for group in every
        ],
        "both, MiB in all": totals,
    }
    table = points_table(every, columns, "by the methods' own accounting")
    return Section("bytes", "Bytes", tables=[table])


def server(every: Sequence[Group], options: Sequence[Swept]) -> Section:
    """Show what the training of the server's model took, and how fast it was."""
    section = Section("server", "Server")
    members = [group for group in every if group.first.learnings]
    if not members:
        return section
    # Runs of different versions may name their phases differently.
    names: dict[str, None] = {}
    for group in members:
        for run in group.runs:
            for learning in run.learnings:
                names |= dict.fromkeys(learning.seconds)
    shown = few_bars(members, options)
    section.text += held_text(shown)
    section.charts += stacked_bars(
        shown.groups,
        lambda group: {name: _learning_seconds(group, name) for name in names},
        Axis("seconds of learning"),
    )
    rows: list[Row] = []
    for family in by_key(members).values():
        for group in family:
            rows += _network_rows(group, list(names))
    section.tables.append(Table(SERVER_COLUMNS, rows))
    section.text.append(
        "Bars are named clients on ranks. The share of the peak is known only for GPUs."
    )
    return section


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
