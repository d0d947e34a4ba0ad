"""A run in progress on a terminal: how far it is, curves, where its time goes; and a
study: how far its trials are.
"""

from collections.abc import Mapping
from math import isnan

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpcfed.analysis.labels import all_series
from hpcfed.analysis.render.show import of_new_clients, title
from hpcfed.analysis.render.watch.looking import RunView, learns_at_end, unrecorded
from hpcfed.analysis.render.watch.trials import SHOWN, StudyView, TrialView
from hpcfed.analysis.run_findings.machine import machine_text
from hpcfed.errors import count, printable
from hpcfed.options.metrics import label_of, text_of
from hpcfed.results.stacks import advanced_together
from hpcfed.words import bytes_text, duration, short_seconds, time_text

STYLES = ("cyan", "magenta", "green")
"""Colours of a metric's series: clients, participants, global model."""
LOSS_STYLE = "yellow"
HEIGHT = 6
"""Lines of a curve."""
NARROW = 100
"""Terminal width below which curves are one above the other."""
LABEL = 8
"""Columns of a curve's axis."""
MOST_PHASES = 5
BAR = 24
"""Columns of the bar of a phase that takes all the time."""
STATUS_STYLES = {
    "complete": "bold green",
    "failed": "bold red",
    "interrupted": "bold red",
    "stopped": "bold yellow",
}
MOST_SEEDS = 12
"""Most seeds in the table."""


def run_frame(view: RunView, console: Console) -> RenderableType:
    """Return everything worth knowing about a run at this moment."""
    folder = printable(str(view.folder))
    if not view.records:
        return Group(Text(f"{folder}: {unrecorded(view)}"), life_line(view))
    width = min(console.width, 160)
    first = view.records[0]
    seeds = len(view.records)
    whose = f"seed {first.facts['seed']}" if seeds == 1 else f"{seeds} seeds"
    if seeds > 1 and advanced_together([record.stacks for record in view.records]):
        whose += " at once"
    parts: list[RenderableType] = [
        Text(printable(f"{title(first)}, {whose}")),
        Text(folder, style="dim"),
        status_line(view),
    ]
    life = life_line(view)
    if life:
        parts.append(life)
    if view.done:
        parts += [Text(), _charts(view, console, width)]
        if seeds > 1:
            parts += [Text(), _seeds(view)]
        parts += [Text(), _phases(view), _facts(view)]
    return Group(*parts)


def status_line(view: RunView) -> RenderableType:
    """Return status, rounds and the remaining time, with a progress bar."""
    line = Table.grid(padding=(0, 2, 0, 0))
    style = STATUS_STYLES.get(view.status, "bold")
    rounds = f"round {view.done} of {view.planned}{of_new_clients(view.timed)}"
    bar = ProgressBar(total=max(view.planned, 1), completed=view.done, width=30)
    line.add_row(Text(view.status, style=style), rounds, bar, Text(speed(view)))
    return line


def speed(view: RunView) -> str:
    """Return the time of recent rounds and, during a run, the remaining time."""
    if isnan(view.pace):
        return ""
    text = f"pace {short_seconds(view.pace)}/round"
    # After the last round the server learns; the round is recorded only afterwards.
    if view.over or view.done == view.planned or view.learning is not None:
        return text
    text += f"  ETA {duration(view.left)}"
    if any(map(learns_at_end, view.records)):
        text += ", then the server learns"
    return text


def life_line(view: RunView) -> Text:
    """Return what the run is doing, how it ended, or for how long it has been
    silent.
    """
    errors = {record.error for record in view.records if record.error}
    if view.over:
        return Text(printable("; ".join(errors)), style="red")
    text = Text()
    learning = view.learning
    if learning is not None:
        loss = "" if learning.loss is None else f", loss {learning.loss:.4g}"
        step = f"{learning.network} step {learning.step} of {learning.steps}{loss}"
        resumed = ""
        if learning.resumed:
            resumed = f" (learning resumed at step {learning.resumed})"
        words = f"the server learns: {step}{resumed}, ETA {duration(learning.left)}"
        text.append(printable(words), style="bold")
    elif view.sign is not None:
        text.append(printable(f"now: {view.sign.phase}"))
        # Fast rounds change their phase all the time.
        if view.sign.seconds >= 1:
            text.append(f", for {duration(view.sign.seconds)}")
    if not view.records:
        return text  # before the first round there are hardly any signs
    if view.silent:
        text.append(f"  no sign of life for {duration(view.age)}", style="bold red")
    elif not isnan(view.age):
        text.append(f"  last sign of life {view.age:.0f} s ago", style="dim")
    machine = "" if view.sign is None or view.silent else machine_text(view.sign)
    if machine:
        text.append(f"\n{machine}", style="dim")
    return text


def _charts(view: RunView, console: Console, width: int) -> RenderableType:
    """Return the curves of the main metric and of the training loss."""
    narrow = width < NARROW
    each = (width if narrow else width // 2) - LABEL - 3
    charts = [
        _chart(view, view.metric, all_series(view.metric), console, each),
        _chart(view, "loss", {"train_loss": "train loss"}, console, each),
    ]
    if narrow:
        return Group(*charts)
    side_by_side = Table.grid(padding=(0, 3, 0, 0))
    side_by_side.add_row(*charts)
    return side_by_side


def _chart(
    view: RunView, metric: str, series: Mapping[str, str], console: Console, width: int
) -> RenderableType:
    """Return the curves of several series of a metric, with a legend."""
    of_training = "train_loss" in series
    by_style, legend = {}, Table.grid(padding=(0, 2, 0, 0))
    styles = (LOSS_STYLE,) if of_training else STYLES
    for style, (name, whose) in zip(styles, series.items(), strict=False):
        values, last = view.series(name), view.last(name)
        # Every round has a loss of its training, even if it is not finite.
        if of_training or np.isfinite(values).any():
            by_style[style] = values
            text = f"{last:.4f}" if of_training else text_of(metric, last)
            legend.add_row(Text("━", style), whose, Text(text, "bold"))
    if not by_style:
        label = label_of(metric, view.records[0].task)
        return Text(f"{label}: not evaluated yet")
    ascii_only = console.options.ascii_only
    by_factors = metric == "loss"
    for values in by_style.values():
        # A loss may fall so far that a linear scale would only show a corner.
        known = values[np.isfinite(values)]
        falls = len(known) > 0 and known.min() > 0 and known.max() > 20 * known.min()
        by_factors = by_factors and falls
    if by_factors:
        by_style = {style: np.log(values) for style, values in by_style.items()}
    drawn, low, high = curves(
        by_style, width=width, height=HEIGHT, ascii_only=ascii_only
    )
    chart = Table.grid()
    for number, line in enumerate(drawn):
        label = ""
        if number in (0, HEIGHT - 1):
            value = low if number else high
            label = text_of(metric, np.exp(value) if by_factors else value)
        edge = "|" if ascii_only else "│"
        chart.add_row(Text(f"{label:>{LABEL}}{edge}", "dim"), line)
    ends = f"1{f'round {view.done}':>{width - 1}}"
    chart.add_row("", Text(ends, "dim"))
    return Group(chart, legend)


def _seeds(view: RunView) -> Table:
    """Return a row for each seed: how far it is, and its last figures."""
    metric = view.metric
    names = {}
    for name, whose in all_series(metric).items():
        if not isnan(view.last(name)):
            names[name] = whose
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_row("seed", "", *names.values(), style="dim")
    for record in view.records[:MOST_SEEDS]:
        cells = [text_of(metric, record.last(name)) for name in names]
        seed, done = str(record.facts["seed"]), f"round {record.rounds_done}"
        table.add_row(seed, f"{printable(record.status)}, {done}", *cells)
    more = len(view.records) - MOST_SEEDS
    if more > 0:
        table.add_row("…", f"and {count(more, 'seed')} more")
    return table


def _phases(view: RunView) -> Table:
    """Return where a round's time goes, longest phases first."""
    table = Table.grid(padding=(0, 2, 0, 0))
    phases = view.phases()
    total = sum(phases.values())
    table.add_row(
        "", Text("mean", "dim", justify="right"), "", Text("recent rounds", "dim")
    )
    for name, seconds in list(phases.items())[:MOST_PHASES]:
        share = seconds / total
        mean = Text(short_seconds(seconds), justify="right")
        table.add_row(name, mean, f"{share:4.0%}", "▇" * round(BAR * share))
    return table


def channel_facts(view: RunView) -> list[str]:
    """Return the virtual time so far, and the privacy spent, if the run has them."""
    facts = []
    virtual = view.last("virtual_seconds")
    if not isnan(virtual):
        facts.append(f"virtual time {time_text(virtual)}")
    epsilon = view.last("epsilon")
    if not isnan(epsilon):
        facts.append(f"ε {epsilon:.3g}")
    return facts


def _facts(view: RunView) -> Text:
    """Return the slowest rank, and what all seeds have sent and the server has learnt."""
    facts = []
    slowest = view.slowest()
    if slowest is not None:
        rank, ratio = slowest
        facts.append(f"slowest rank {rank}: trains {ratio:.2f} × the mean")
    facts.append(f"memory {bytes_text(view.timed.peak_memory.max())}")
    facts.append(f"sent {bytes_text(sum(one.sent.sum() for one in view.records))}")
    facts += channel_facts(view)
    learnings = [one for record in view.records for one in record.learnings]
    if learnings:
        seconds = sum(sum(one.seconds.values()) for one in learnings)
        times = count(len(learnings), "time")
        facts.append(f"the server has learnt {times}, {duration(seconds)} in all")
    return Text(" · ".join(facts), style="dim")


# A study.

MOST_ROWS = {"failed": 8, "complete": SHOWN, "running": 12, "stopped": 8, "waiting": 4}
"""Most rows of each status, in the order of the table."""


def study_frame(view: StudyView) -> RenderableType:
    """Return everything worth knowing about a study at this moment."""
    line = Table.grid(padding=(0, 2, 0, 0))
    done = len(view.of_status("complete"))
    bar = ProgressBar(total=max(len(view.trials), 1), completed=done, width=30)
    eta = ""
    if not view.over and not isnan(view.left):
        eta = f"ETA about {duration(view.left)}"
    style = STATUS_STYLES.get(view.status, "bold")
    line.add_row(Text(view.status, style=style), bar, eta)
    head = Text(printable(view.title or "a study"))
    folder = Text(printable(str(view.folder)), style="dim")
    return Group(head, folder, line, Text(view.counts()), Text(), _table(view))


def _table(view: StudyView) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    # On a narrow terminal names are wrapped, and no number is cut.
    table.add_column("trial", overflow="fold", max_width=60)
    for head in ("status", "round", "accuracy", "pace", "left"):
        justify = "left" if head == "status" else "right"
        table.add_column(head, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("")
    for status, most in MOST_ROWS.items():
        trials = view.of_status(status)
        # Show the last of the complete trials, and the first of all others.
        shown = trials[:most]
        if status == "complete":
            shown = [trial for trial in trials if trial.run is not None][-most:]
        for trial in shown:
            table.add_row(*_row(trial))
        more = len(trials) - len(shown)
        if more:
            table.add_row(Text(f"… {more} more {status}", "dim"))
    return table


def _row(trial: TrialView) -> list[RenderableType]:
    status = trial.status
    style = STATUS_STYLES.get(status, "bold" if status == "running" else "dim")
    cells: list[RenderableType] = [Text(printable(trial.name)), Text(status, style)]
    if status == "failed":
        return [*cells, "", "", "", "", Text(printable(trial.error), "red")]
    run = trial.run
    if run is None or not run.records:
        return [*cells, "starting" if status == "running" else ""]
    # The clients' last figure, or the global model's if they have none.
    lasts = [run.last(name) for name in all_series(run.metric)]
    known = [text_of(run.metric, last) for last in lasts if not isnan(last)]
    cells += [f"{run.done}/{run.planned}", next(iter(known), "")]
    cells.append("" if isnan(run.pace) else short_seconds(run.pace))
    if status == "complete":
        took = "" if isnan(trial.outcome.seconds) else str(trial.outcome)
        return [*cells, "", Text(took, "dim")]
    cells.append("" if isnan(run.left) else duration(run.left))
    if run.learning is not None:
        step = f"{run.learning.network} {run.learning.step}/{run.learning.steps}"
        cells.append(Text(printable(f"the server learns: {step}")))
    elif run.silent:
        cells.append(Text(f"no sign of life for {duration(run.age)}", "bold red"))
    return cells


# Small curves on a terminal: a braille cell has two by four dots.

DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""What each dot of a cell adds to its code point: by column, from top to bottom."""
BLANK = 0x2800


def curves(
    series: Mapping[str, np.ndarray], *, width: int, height: int, ascii_only: bool
) -> tuple[list[Text], float, float]:
    """Draw series over rounds, each in the style that is its key; return the lines, and
    the values at the bottom and at the top.

    NaN marks rounds without a value.
    """
    known = {}
    for style, values in series.items():
        if np.isfinite(values).any():
            known[style] = values
    if not known:
        return [Text(" " * width) for _ in range(height)], np.nan, np.nan
    every = np.concatenate([values[np.isfinite(values)] for values in known.values()])
    low, high = float(every.min()), float(every.max())
    codes = np.zeros((height, width), int)
    styles = np.full((height, width), "", object)
    for style, values in known.items():
        for column, (top, bottom) in _strokes(values, low, high, 2 * width, 4 * height):
            for row in range(top, bottom + 1):
                codes[row // 4, column // 2] |= DOTS[column % 2][row % 4]
                styles[row // 4, column // 2] = style
    lines = []
    for of_cells, of_styles in zip(codes, styles, strict=True):
        line = Text()
        for code, style in zip(of_cells, of_styles, strict=True):
            drawn = "*" if ascii_only else chr(BLANK + code)
            line.append(drawn if code else " ", style)
        lines.append(line)
    return lines, low, high


def _strokes(
    values: np.ndarray, low: float, high: float, columns: int, rows: int
) -> list[tuple[int, tuple[int, int]]]:
    """Return which rows of dots a curve covers in each of its columns, from the first
    known value to the last.
    """
    known = np.flatnonzero(np.isfinite(values))
    # Rounds without a value are interpolated between their neighbours.
    places = np.linspace(0, max(len(values) - 1, 1), columns)
    inside = (places >= known[0]) & (places <= known[-1])
    # A single round may lie between two dots.
    inside[np.abs(places - known[-1]).argmin()] = True
    heights = np.interp(places, known, values[known])
    span = high - low or 1.0
    dots = np.rint((high - heights) / span * (rows - 1)).astype(int)
    strokes = []
    last = None
    for column in np.flatnonzero(inside):
        dot = int(dots[column])
        # Connect to the previous dot, so that a steep curve stays one line.
        begin = dot if last is None else last
        strokes.append((int(column), (min(begin, dot), max(begin, dot))))
        last = dot
    return strokes
