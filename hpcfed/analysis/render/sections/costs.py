"""What a round costs: seconds by phase, memory, and bytes sent."""

from collections.abc import Sequence

from hpcfed.analysis.choices import grouped
from hpcfed.analysis.findings import MEBIBYTES, MS
from hpcfed.analysis.groups import Group
from hpcfed.analysis.labels import ranks_label
from hpcfed.analysis.render.charts import Axis, Line
from hpcfed.analysis.render.sections.section import (
    MOST_LINES,
    Section,
    few_bars,
    held_text,
    line_charts,
    lying_bars,
    one_size_each,
    points_table,
    stacked_bars,
    ticks,
)
from hpcfed.analysis.swept import Swept, held
from hpcfed.results.pace import MS_PER_ROUND, PER_ROUND_MEANS
from hpcfed.runtime.timer import PHASES
from hpcfed.words import MIB


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
        total = sum(float(run.sent.sum()) for run in group.seeds)
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
