"""What a run cost beside time: bytes sent, and memory."""

import numpy as np

from hpcfed.analysis.curves import curve, merged
from hpcfed.analysis.findings import Table
from hpcfed.analysis.groups import Group
from hpcfed.analysis.render.charts import Axis, Drawing, Line, bars, lines
from hpcfed.analysis.render.sections.section import Section
from hpcfed.words import MIB, number

MOST_RANKS = 32
"""Ranks that have a bar each; of more, a sentence says enough."""
WAYS = {"bytes_up": "sent by clients", "bytes_down": "sent to clients"}


def traffic(group: Group) -> Section:
    """Show what was sent in every round, and until then."""
    section = Section("traffic", "Traffic")
    sent = {whose: group.first.rounds[name] for name, whose in WAYS.items()}
    total = sum(float(np.nansum(values)) for values in sent.values())
    if not total:
        return section
    by_round, until_then = [], []
    for whose, values in sent.items():
        by_round.append(curve(whose, [values], scale=1 / MIB))
        until_then.append(curve(whose, [np.nancumsum(values)], scale=1 / MIB))
    if len(group.first.wall) > 1:
        # A method that sends the same in every round has a flat line, which a figure
        # in the table says as well.
        if any(_changes(values) for values in sent.values()):
            section.charts.append(_drawn("traffic of every round", by_round))
        section.charts.append(_drawn("traffic up to each round", until_then))
    rows = []
    for whose, values in sent.items():
        known = values[np.isfinite(values)] / MIB
        rows.append([whose, number(float(known.mean())), number(float(known.sum()))])
    columns = ("by the method's own accounting", "MiB per round", "MiB in all")
    section.tables.append(Table(columns, rows))
    return section


def _changes(values: np.ndarray) -> bool:
    known = values[np.isfinite(values)]
    return len(known) > 0 and float(np.ptp(known)) > 0.01 * float(known.max())


def _drawn(title: str, curves: list[Line]) -> Drawing:
    told = merged(curves)
    # A single line has no legend.
    if len(told) == 1:
        title += f": {told[0].name}"
    return lines(title, told, Axis("rounds", whole=True), Axis("MiB", zero=True))


def memory(group: Group) -> Section:
    """Show the peak memory of every rank."""
    section = Section("memory", "Memory")
    run = group.first
    peaks = run.peak_memory / MIB
    if 1 < len(peaks) <= MOST_RANKS:
        names = [f"rank {rank}" for rank in range(len(peaks))]
        drawn = bars(
            "peak memory of every rank",
            names,
            {"peak": peaks.tolist()},
            Axis("MiB"),
            "ranks that host clients",
        )
        section.charts.append(drawn)
    rows = [["of the rank that has most", number(float(peaks.max()))]]
    if len(peaks) > 1:
        rows.append(["mean over ranks", number(float(peaks.mean()))])
    if run.learnings:
        largest = float(run.learnings[-1].peak_memory.max()) / MIB
        rows.append(["of a server rank", number(largest)])
    if run.energy is not None and not np.isnan(run.energy):
        section.text.append(f"The GPUs of the ranks used {run.energy:,.0f} J.")
    if run.cpu_energy is not None and not np.isnan(run.cpu_energy):
        section.text.append(
            f"CPUs and memory of the hosts used {run.cpu_energy:,.0f} J, with whatever "
            "else ran there."
        )
    section.text.append(
        "Measured in the device's allocator on a GPU, and for the whole process on a CPU."
    )
    section.tables.append(Table(("peak memory", "MiB"), rows))
    return section
