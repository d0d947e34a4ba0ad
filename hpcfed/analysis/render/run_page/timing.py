"""Where the time of a run went: phases of every rank, round by round."""

import numpy as np

from hpcfed.analysis.curves import windows
from hpcfed.analysis.findings import Table
from hpcfed.analysis.groups import Group, Process
from hpcfed.analysis.render.charts import Axis, Drawing, Span, areas, timeline
from hpcfed.analysis.render.sections.section import Section
from hpcfed.results.pace import MS_PER_ROUND, PER_ROUND_MEANS, counted, per_round
from hpcfed.results.run import RunRecord
from hpcfed.runtime.timer import PHASES
from hpcfed.words import number

MOST_RANKS = 32
"""Ranks of a timeline; of more, those at even distances."""
MOST_REACH = 4.0
"""How many times a usual round a chart of all rounds shows."""
SLOW = 2.0
"""How many times a usual round the slowest takes to be drawn beside it."""


def timing(group: Group) -> Section:
    """Show the phases of all rounds, and of every rank in a usual round."""
    section = Section("time", "Where the time went")
    run = group.first
    first = run.untimed
    phases = run.phases[first:]
    if not len(phases) or not np.isfinite(phases).all():
        return section
    if len(phases) > 1:
        section.charts.append(_over_rounds(phases, first))
    seconds = phases.sum(2).max(1)
    # The first round warms up, so it is usual only where there is no other.
    steady = counted(seconds)
    middle = np.argsort(steady)[len(steady) // 2] + len(seconds) - len(steady)
    slowest = int(seconds.argmax())
    section.charts.append(_ranks(run, first + int(middle), "a usual round"))
    if seconds[slowest] > SLOW * seconds[middle]:
        section.charts.append(_ranks(run, first + slowest, "the slowest round"))
    section.tables.append(_table(group.processes[0]))
    section.text.append(
        "Every rank goes through the phases in this order and waits for the others where "
        "they exchange something: waiting counts in the phase in which it happens, "
        "mostly aggregate and server."
    )
    return section


def _over_rounds(phases: np.ndarray, first: int) -> Drawing:
    """Draw means over ranks, upon each other, with many rounds in windows."""
    means = 1e3 * phases.mean(1)
    across: list[float] = []
    heights: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for window in windows(np.arange(len(means))):
        across.append(float(window.mean()) + 1 + first)
        for phase, value in zip(PHASES, means[window].mean(0).tolist(), strict=True):
            heights[phase].append(value)
    totals = np.sum(list(heights.values()), axis=0)
    x, y = Axis("rounds", whole=True), Axis("ms of a round", zero=True)
    title = "phases of every round, mean over ranks"
    # One round in which the server learns may be as long as all others together.
    usual = float(per_round(totals))
    if totals.max() > MOST_REACH * usual:
        y = Axis("ms of a round (cut)", zero=True, most=MOST_REACH * usual)
        title += "; the longest are cut"
    return areas(title, across, heights, x, y)


def _ranks(run: RunRecord, round: int, which: str) -> Drawing:
    """Draw what every rank did in a round, phase after phase."""
    ranks = run.phases.shape[1]
    chosen = np.linspace(0, ranks - 1, min(ranks, MOST_RANKS)).round().astype(int)
    spans = []
    for rank in chosen.tolist():
        start = 0.0
        for phase, seconds in zip(PHASES, run.phases[round, rank], strict=True):
            end = start + 1e3 * float(seconds)
            if end > start:
                spans.append(Span(f"rank {rank}", start, end, phase))
            start = end
    title = f"{which}, number {round + 1}, by rank"
    return timeline(title, spans, Axis("ms", zero=True), names=PHASES)


def _table(process: Process) -> Table:
    """Return the phases of `hpcfed show`, with the slowest and the fastest rank."""
    usual, totals = process.phase_seconds, process.runs[0].phase_totals()
    whole = sum(totals.values())
    by_rank = 1e3 * per_round(process.phases)
    rows = []
    for name, seconds in sorted(totals.items(), key=lambda item: -item[1]):
        if seconds > 0:
            of_ranks = by_rank[:, PHASES.index(name)]
            ends = [number(float(end)) for end in (of_ranks.min(), of_ranks.max())]
            in_all = [number(seconds), number(100 * seconds / whole)]
            rows.append([name, number(1e3 * usual[name]), *in_all, *ends])
    usual_round = number(1e3 * process.round_seconds)
    whole_run = number(process.runs[0].timed_seconds())
    rows.append(["round", usual_round, whole_run, "", "", ""])
    columns = ["phase", MS_PER_ROUND, "s in all rounds", "share, %"]
    if by_rank.shape[0] == 1:
        rows = [row[:4] for row in rows]
    else:
        columns += ["ms, least of a rank", "ms, most of a rank"]
    return Table(columns, rows, PER_ROUND_MEANS)
