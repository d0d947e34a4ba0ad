"""Watching a study only through its files: which of its trials are waiting, running,
done or failed.
"""

import socket
from dataclasses import dataclass, replace
from math import isnan, nan
from pathlib import Path
from statistics import mean

from hpcfed.analysis.render.watch.looking import (
    SILENT,
    Looker,
    RunView,
    holds_any_run,
    log_of,
)
from hpcfed.errors import UserError
from hpcfed.results.claim import is_study_abandoned
from hpcfed.results.folder import PLAN, POINTS, STUDY
from hpcfed.results.study import Outcome, read_listing, read_outcome

STATUSES = ("complete", "running", "stopped", "waiting", "failed")
SHOWN = 5
"""Number of complete trials whose figures are read: the most recent ones."""


@dataclass(frozen=True)
class TrialView:
    """A trial as its files show it at one moment."""

    name: str
    folder: Path
    outcome: Outcome
    run: RunView | None = None
    """What it has recorded, if that was read."""
    abandoned: bool = False
    """Whether the study's process is gone."""

    @property
    def status(self) -> str:
        """One of `STATUSES`."""
        if self.outcome.status != "waiting":
            return self.outcome.status
        run = self.run
        if run is None:
            return "waiting"
        if run.lost or (self.abandoned and run.status == "starting"):
            return "stopped"
        # One that goes on says so within seconds. The process that would write how it
        # went may be gone.
        if not run.over or run.held or not run.age > SILENT:
            return "running"
        return "stopped" if run.status == "interrupted" else run.status

    @property
    def error(self) -> str:
        """Why it has failed."""
        if self.outcome.error or self.run is None:
            return self.outcome.error
        errors = [self.run.error, *(record.error for record in self.run.records)]
        return next(filter(None, errors), "")


@dataclass(frozen=True)
class StudyView:
    """A study as its files show it at one moment."""

    folder: Path
    title: str
    trials: tuple[TrialView, ...]
    abandoned: bool = False
    """Whether its process is gone, so that nothing will start what still waits."""

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
        """Whether every trial has ended, or the study was stopped."""
        if self.of_status("running"):
            return False
        waits = self.of_status("waiting") and not self.abandoned
        return bool(self.of_status("stopped")) or not waits

    @property
    def status(self) -> str:
        if not self.over:
            return "running"
        if self.of_status("stopped") or self.of_status("waiting"):
            return "stopped"
        return "failed" if self.of_status("failed") else "complete"

    @property
    def left(self) -> float:
        """Seconds until all are done, assuming that waiting trials take as long as
        finished ones did; NaN while unknown.
        """
        running = self.of_status("running")
        rests = []
        for trial in running:
            left = nan if trial.run is None else trial.run.left
            rests.append(0.0 if isnan(left) else left)
        waiting = len(self.of_status("waiting"))
        took = [trial.outcome.seconds for trial in self.of_status("complete")]
        took = [seconds for seconds in took if not isnan(seconds)]
        if not took:
            return nan if waiting else max(rests, default=nan)
        # Assume as many at a time as now.
        at_once = max(1, len(running))
        return max(rests, default=0.0) + waiting * mean(took) / at_once


class StudyLooker:
    """Watches a study repeatedly, and reads only what has changed."""

    def __init__(self) -> None:
        self._looker = Looker()
        self._ended: dict[str, TrialView] = {}
        """Complete trials, which no longer change."""

    def look(self, folder: Path) -> StudyView:
        """Look at the folder of a study."""
        listing = read_listing(folder)
        # Before the trials: an outcome may be written meanwhile. On another machine
        # locks may not be seen.
        gone = listing.host == socket.gethostname() and is_study_abandoned(folder)
        trials = []
        for name in listing.trials:
            trials.append(replace(self._look_at(folder, name), abandoned=gone))
        ended = [trial for trial in trials if trial.status == "complete"]
        shown = {trial.name for trial in sorted(ended, key=_ended_at)[-SHOWN:]}
        for number, trial in enumerate(trials):
            if trial.name in shown and trial.run is None:
                trials[number] = self._with_run(trial)
        return StudyView(folder, listing.title, tuple(trials), gone)

    def _look_at(self, folder: Path, name: str) -> TrialView:
        if name in self._ended:
            return self._ended[name]
        path = folder / POINTS / name
        outcome = read_outcome(path.with_suffix(".json"))
        trial = TrialView(name, path, outcome)
        if outcome.status == "complete":
            self._ended[name] = trial
        # Its log exists as soon as its processes are started.
        begun = holds_any_run(path) or log_of(path).exists()
        if outcome.status == "waiting" and begun:
            return self._with_run(trial)
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
