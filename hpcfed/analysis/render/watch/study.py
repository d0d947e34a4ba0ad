"""A study in progress: which of its trials are waiting, running, done or failed, and
when all of them will be done.
"""

from dataclasses import dataclass, replace
from math import isnan
from pathlib import Path
from statistics import mean

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpcfed.analysis.labels import all_series
from hpcfed.analysis.render.watch.frame import STATUS_STYLES
from hpcfed.analysis.render.watch.looking import Looker, RunView, holds_any_run
from hpcfed.errors import UserError, printable
from hpcfed.options.metrics import text_of
from hpcfed.results.folder import PLAN, POINTS, STUDY
from hpcfed.results.study import Outcome, read_listing, read_outcome
from hpcfed.words import duration, short_seconds

STATUSES = ("complete", "running", "waiting", "failed")
SHOWN = 5
"""Number of complete trials whose figures are read: the most recent ones."""
MOST_ROWS = {"failed": 8, "complete": SHOWN, "running": 12, "waiting": 4}
"""Most rows of each status, in the order of the table."""


@dataclass(frozen=True)
class TrialView:
    """A trial as its files show it at one moment."""

    name: str
    folder: Path
    outcome: Outcome
    run: RunView | None = None
    """What it has recorded, if that was read."""

    @property
    def status(self) -> str:
        """One of `STATUSES`."""
        if self.outcome.status != "waiting":
            return self.outcome.status
        return "waiting" if self.run is None else "running"


@dataclass(frozen=True)
class StudyView:
    """A study as its files show it at one moment."""

    folder: Path
    title: str
    trials: tuple[TrialView, ...]

    def of_status(self, status: str) -> list[TrialView]:
        """Return the trials of a status, in the study's order."""
        return [trial for trial in self.trials if trial.status == status]

    def counts(self) -> str:
        """Return `3 of 8 complete, 1 running, 4 waiting`."""
        words = []
        for status in STATUSES:
            number = len(self.of_status(status))
            of_all = f" of {len(self.trials)}" if status == "complete" else ""
            if number or of_all:
                words.append(f"{number}{of_all} {status}")
        return ", ".join(words)

    @property
    def over(self) -> bool:
        """Whether every trial has ended."""
        return not self.of_status("waiting") and not self.of_status("running")

    @property
    def status(self) -> str:
        if not self.over:
            return "running"
        return "failed" if self.of_status("failed") else "complete"

    @property
    def left(self) -> float:
        """Seconds until all are done, assuming that waiting trials take as long as
        finished ones did; NaN while unknown.
        """
        running = self.of_status("running")
        rests = [_rest(trial) for trial in running]
        waiting = len(self.of_status("waiting"))
        took = [trial.outcome.seconds for trial in self.of_status("complete")]
        took = [seconds for seconds in took if not isnan(seconds)]
        if not took:
            return float("nan") if waiting else max(rests, default=float("nan"))
        # Assume as many at a time as now.
        at_once = max(1, len(running))
        return max(rests, default=0.0) + waiting * mean(took) / at_once


def _rest(trial: TrialView) -> float:
    """Return the remaining seconds of a running trial; 0 while unknown."""
    left = float("nan") if trial.run is None else trial.run.left
    return 0.0 if isnan(left) else left


class StudyLooker:
    """Watches a study repeatedly, and reads only what has changed."""

    def __init__(self) -> None:
        self._looker = Looker()
        self._ended: dict[str, TrialView] = {}
        """Complete trials, which no longer change."""

    def look(self, folder: Path) -> StudyView:
        """Look at the folder of a study."""
        listing = read_listing(folder)
        trials = [self._look_at(folder, name) for name in listing.trials]
        ended = [trial for trial in trials if trial.status == "complete"]
        shown = {trial.name for trial in sorted(ended, key=_ended_at)[-SHOWN:]}
        for number, trial in enumerate(trials):
            if trial.name in shown and trial.run is None:
                trials[number] = self._with_run(trial)
        return StudyView(folder, listing.title, tuple(trials))

    def _look_at(self, folder: Path, name: str) -> TrialView:
        if name in self._ended:
            return self._ended[name]
        path = folder / POINTS / name
        outcome = read_outcome(path.with_suffix(".json"))
        trial = TrialView(name, path, outcome)
        if outcome.status == "complete":
            self._ended[name] = trial
        elif outcome.status == "waiting":
            # Its log exists as soon as its processes are started.
            if holds_any_run(path):
                return self._with_run(trial)
            if path.with_suffix(".log").exists():
                return replace(trial, run=RunView(path))
        return trial

    def _with_run(self, trial: TrialView) -> TrialView:
        try:
            seen = replace(trial, run=self._looker.look(trial.folder))
        except UserError:
            # An unreadable record is reported through the trial's own outcome.
            seen = replace(trial, run=RunView(trial.folder))
        if trial.name in self._ended:
            self._ended[trial.name] = seen
        return seen


def _ended_at(trial: TrialView) -> float:
    try:
        return trial.folder.with_suffix(".json").stat().st_mtime
    except OSError:
        return 0.0


def holds_study(folder: Path) -> bool:
    """Tell whether a study has begun in a folder."""
    return any((folder / name).exists() for name in (PLAN, POINTS, STUDY))


# On a terminal.


def study_frame(view: StudyView) -> RenderableType:
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
    """Return the clients' last figure, or the global model's if they have none."""
    for name in all_series(run.metric):
        value = run.last(name)
        if not isnan(value):
            return text_of(run.metric, value)
    return ""
