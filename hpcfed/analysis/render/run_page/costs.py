"""Charts of a run's costs: phases of all ranks, training of the server's model, bytes
and memory.
"""

from collections.abc import Mapping

import numpy as np

from hpcfed.analysis.curves import curve, merged, windows
from hpcfed.analysis.render.charts import (
    Axis,
    Drawing,
    Line,
    Stretch,
    areas,
    bars,
    lines,
    timeline,
)
from hpcfed.analysis.render.sections.section import MOST_BARS, MOST_LINES, Section
from hpcfed.results.pace import counted, per_round
from hpcfed.results.run import RunRecord
from hpcfed.results.stored import RunDetails
from hpcfed.runtime.timer import PHASES
from hpcfed.words import MIB

MOST_RANKS = 32
"""Most ranks in a chart. A timeline of more shows an even selection."""
MOST_REACH = 4.0
"""The longest round in a chart of all rounds, as a multiple of a typical one."""
SLOW = 2.0
"""The slowest round is drawn too if it takes this many times a typical one."""
MOST_STEPS = 200
"""Most points of a loss curve; more steps are averaged."""
SENT = {"bytes_up": "sent by clients", "bytes_down": "sent to clients"}


def timing(run: RunRecord) -> Section:
    """Draw the phases of all rounds, and of all ranks in a typical round."""
    section = Section("time", "Where the time went")
    first = run.untimed
    phases = run.phases[first:]
    if not len(phases) or not np.isfinite(phases).all():
        return section
    if len(phases) > 1:
        section.charts.append(_phases(phases, first))
    seconds = phases.sum(2).max(1)
    # The first round warms up, so it is typical only if it is the only one.
    steady = counted(seconds)
    middle = np.argsort(steady)[len(steady) // 2] + len(seconds) - len(steady)
    slowest = int(seconds.argmax())
    section.charts.append(_ranks(run, first + int(middle), "a usual round"))
    if seconds[slowest] > SLOW * seconds[middle]:
        section.charts.append(_ranks(run, first + slowest, "the slowest round"))
    section.text.append(
        "Every rank goes through the phases in this order and waits for the others where "
        "they exchange something: waiting counts in the phase in which it happens, "
        "mostly aggregate and server."
    )
    return section


def _phases(phases: np.ndarray, first: int) -> Drawing:
    """Draw stacked means over ranks, averaging windows of rounds if there are many."""
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
    # One round in which the server learns may take as long as all others together.
    usual = float(per_round(totals))
    if totals.max() > MOST_REACH * usual:
        y = Axis("ms of a round (cut)", zero=True, most=MOST_REACH * usual)
        title += "; the longest are cut"
    return areas(title, across, heights, x, y)


def _ranks(run: RunRecord, round: int, which: str) -> Drawing:
    """Draw what each rank did in a round, phase by phase."""
    ranks = run.phases.shape[1]
    chosen = np.linspace(0, ranks - 1, min(ranks, MOST_RANKS)).round().astype(int)
    stretches = []
    for rank in chosen.tolist():
        start = 0.0
        for phase, seconds in zip(PHASES, run.phases[round, rank], strict=True):
            end = start + 1e3 * float(seconds)
            if end > start:
                stretches.append(Stretch(f"rank {rank}", start, end, phase))
            start = end
    title = f"{which}, number {round + 1}, by rank"
    return timeline(title, stretches, Axis("ms", zero=True), names=PHASES)


def server(run: RunRecord, details: RunDetails) -> Section:
    """Draw losses and times of all trainings of the server's model."""
    section = Section("server", "The server's model")
    if not run.learnings:
        return section
    rounds = [learning.round + 1 for learning in run.learnings]
    for network, losses in details.losses.items():
        section.charts += _loss(network, losses, rounds)
    if 1 < len(rounds) <= MOST_BARS:
        names = [f"after {number}" for number in rounds]
        segments = {}
        for phase in run.learnings[0].seconds:
            segments[phase] = [one.seconds.get(phase, 0.0) for one in run.learnings]
        y = Axis("seconds")
        drawn = bars("seconds of every training", names, segments, y, "round")
        section.charts.append(drawn)
    return section


def _loss(network: str, losses: np.ndarray, rounds: list[int]) -> list[Drawing]:
    """Draw the loss over steps, one line for each of the last trainings."""
    drawn = []
    for after, of_steps in list(zip(rounds, losses, strict=False))[-MOST_LINES:]:
        known = np.flatnonzero(np.isfinite(of_steps))
        x, y = [], []
        for window in windows(known, MOST_STEPS):
            x.append(float(window.mean()) + 1)
            y.append(float(of_steps[window].mean()))
        if len(x) > 1:
            drawn.append(Line(f"after round {after}", x, y))
    steps, loss = Axis("steps", whole=True), Axis("loss (log)", log=True)
    title = f"loss of the {network}"
    return [lines(title, drawn, steps, loss)] if drawn else []


def traffic_and_memory(run: RunRecord, timed: RunRecord) -> Section:
    """Draw what was sent in each round and in total, and the memory of each rank: that
    of the process, which the run with its times has.
    """
    section = Section("costs", "Traffic, memory and energy")
    sent = {whose: run.rounds[name] for name, whose in SENT.items()}
    if run.rounds_done > 1 and any(np.nansum(values) for values in sent.values()):
        # A method that sends the same in every round has a flat line; the table is
        # enough.
        if any(_changes(values) for values in sent.values()):
            section.charts.append(_traffic("traffic of every round", sent))
        so_far = {whose: np.nancumsum(values) for whose, values in sent.items()}
        section.charts.append(_traffic("traffic up to each round", so_far))
    peaks = timed.peak_memory / MIB
    if 1 < len(peaks) <= MOST_RANKS:
        ranks = [f"rank {rank}" for rank in range(len(peaks))]
        heights = {"peak": peaks.tolist()}
        x, title = "ranks that host clients", "peak memory of every rank"
        if timed.untimed:
            title += f", from round {timed.untimed + 1} on"
        section.charts.append(bars(title, ranks, heights, Axis("MiB"), x))
    section.text.append(
        "Traffic is what the method's own accounting says. Memory is that of the "
        "device's allocator on a GPU, and of the whole process on a CPU. The energy of "
        "CPUs and memory includes whatever else ran on the hosts."
    )
    return section


def _changes(values: np.ndarray) -> bool:
    known = values[np.isfinite(values)]
    return len(known) > 0 and float(np.ptp(known)) > 0.01 * float(known.max())


def _traffic(title: str, sent: Mapping[str, np.ndarray]) -> Drawing:
    curves = []
    for whose, values in sent.items():
        curves.append(curve(whose, [values], scale=1 / MIB))
    told = merged(curves)
    # A single line has no legend.
    if len(told) == 1:
        title += f": {told[0].name}"
    return lines(title, told, Axis("rounds", whole=True), Axis("MiB", zero=True))
