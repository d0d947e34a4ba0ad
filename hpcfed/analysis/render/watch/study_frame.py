"""A study on a terminal while it goes on: its trials, and when all of them are done."""

from math import isnan

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpcfed.analysis.labels import all_series
from hpcfed.analysis.render.watch.frame import STATUS_STYLES
from hpcfed.analysis.render.watch.looking import RunView
from hpcfed.analysis.render.watch.trials import SHOWN, StudyView, TrialView
from hpcfed.errors import printable
from hpcfed.options.metrics import text_of
from hpcfed.words import duration, short_seconds

MOST_ROWS = {"failed": 8, "complete": SHOWN, "running": 12, "waiting": 4}
"""Rows of each status at most, in the order of the table."""


def study_frame(view: StudyView, console: Console) -> RenderableType:
    """Return everything worth knowing about a study at this moment."""
    head = printable(view.title or "a study")
    line = Table.grid(padding=(0, 2, 0, 0))
    done = len(view.of_status("complete"))
    bar = ProgressBar(total=max(len(view.trials), 1), completed=done, width=30)
    eta = ""
    if not view.over and not isnan(view.left):
        eta = f"ETA about {duration(view.left)}"
    style = STATUS_STYLES.get(view.status, "bold")
    line.add_row(Text(view.status, style=style), bar, eta)
    folder = printable(str(view.folder))
    return Group(
        Text(head),
        Text(folder, style="dim"),
        line,
        Text(view.counts()),
        Text(),
        _table(view),
    )


def _table(view: StudyView) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    # In a narrow terminal names give way, and no number is cut.
    table.add_column("trial", overflow="fold", max_width=60)
    for head in ("status", "round", "accuracy", "pace", "left"):
        justify = "left" if head == "status" else "right"
        table.add_column(head, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("")
    for status, most in MOST_ROWS.items():
        trials = view.of_status(status)
        # Of those that are done the last ones, of all others the next ones.
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
        return [*cells, "", "", "", "", Text(printable(trial.outcome.error), "red")]
    run = trial.run
    if run is None or not run.records:
        return [*cells, "starting" if status == "running" else ""]
    cells += [f"{run.done}/{run.planned}", _headline(run)]
    cells.append("" if isnan(run.pace) else short_seconds(run.pace))
    if status == "complete":
        return [*cells, "", Text(str(trial.outcome), "dim")]
    cells.append("" if isnan(run.left) else duration(run.left))
    if run.learning is not None:
        step = f"{run.learning.network} {run.learning.step}/{run.learning.steps}"
        cells.append(Text(printable(f"the server learns: {step}")))
    elif run.silent:
        cells.append(Text(f"no sign of life for {duration(run.age)}", "bold red"))
    return cells


def _headline(run: RunView) -> str:
    """Return the clients' last figure, or the global model's where they have none."""
    for name in all_series(run.metric):
        value = run.last(name)
        if not isnan(value):
            return text_of(run.metric, value)
    return ""
