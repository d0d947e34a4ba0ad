"""What a round costs: seconds by phase, memory, and bytes sent."""

from collections.abc import Sequence
from functools import partial

from hpcfed.analysis.findings import Table
from hpcfed.analysis.groups import Group
from hpcfed.analysis.labels import ranks_label
from hpcfed.analysis.render.charts import Axis, Line, lines
from hpcfed.analysis.render.sections.section import (
    MOST_LINES,
    WHICH,
    Section,
    batches,
    by_key_and_ranks,
    few_bars,
    held_text,
    lying_bars,
    one_size_each,
    stacked_bars,
    ticks,
    which,
)
from hpcfed.analysis.swept import Swept, held
from hpcfed.results.pace import MS_PER_ROUND, PER_ROUND_MEANS
from hpcfed.runtime.timer import PHASES
from hpcfed.words import MIB, number


def phases(every: Sequence[Group], options: Sequence[Swept]) -> Section:
    section = Section("phases", "Time of a round by phase")
    section.text.append(
        f"{PER_ROUND_MEANS[0].upper()}{PER_ROUND_MEANS[1:]}. Bars are named clients on "
        "ranks."
    )
    seldom = _seldom(every)
    if seldom:
        section.text.append(
            f"Few rounds go through {' and '.join(seldom)}: not in the bars, and in the "
            "table as a mean over all counted rounds."
        )
    shown = few_bars(every, options)
    section.text += held_text(shown)
    # All groups have the same phases, those of a round.
    segments = {}
    for phase in every[0].phase_seconds:
        segments[phase] = partial(_phase_milliseconds, phase=phase)
    section.charts += stacked_bars(shown.groups, segments, Axis(MS_PER_ROUND))
    section.tables.append(_phase_table(every))
    return section


def _phase_table(every: Sequence[Group]) -> Table:
    """Return the milliseconds of all phases that took any time, of every point."""
    used = [name for name in PHASES if any(_usual(group, name) for group in every)]
    seldom = _seldom(every)
    rows = []
    for group in every:
        cells = [number(_phase_milliseconds(group, phase)) for phase in used]
        cells += [number(1e3 * group.phase_means[phase]) for phase in seldom]
        rows.append([*which(group), *cells])
    means = [f"{phase}, mean" for phase in seldom]
    return Table((*WHICH, *used, *means), rows, MS_PER_ROUND)


def _usual(group: Group, phase: str) -> bool:
    return group.phase_seconds[phase] > 0


def _seldom(every: Sequence[Group]) -> list[str]:
    """Return phases that few rounds go through at some point: their median is 0."""
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
    # Over clients, a line for each number of ranks.
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
    section = Section("bytes", "Bytes")
    rows = []
    for group in every:
        up = group.per_round("bytes_up")
        down = group.per_round("bytes_down")
        # Of one run: seeds may have stopped after different numbers of rounds.
        total = _sent_in_all(group) / len(group.seeds)
        row = which(group)
        for sent_bytes in (up, down, total):
            row.append(number(sent_bytes / MIB))
        rows.append(row)
    columns = (*WHICH, "up, MiB per round", "down, MiB per round", "both, MiB in all")
    section.tables.append(Table(columns, rows, "by the methods' own accounting"))
    return section


def _sent_in_all(group: Group) -> float:
    """Return bytes of all rounds of all seeds, up and down."""
    total = 0.0
    for run in group.seeds:
        up = run.rounds["bytes_up"]
        down = run.rounds["bytes_down"]
        total += float(up.sum() + down.sum())
    return total
