"""Looking at a study while it goes on: which of its trials wait, run, are done or have
failed.
"""

from dataclasses import dataclass, replace
from math import isnan
from pathlib import Path
from statistics import mean

from hpcfed.analysis.render.watch.looking import Looker, RunView, holds_any_run
from hpcfed.errors import UserError
from hpcfed.results.folder import PLAN, POINTS, STUDY
from hpcfed.results.trials import Outcome, read_listing, read_outcome

STATUSES = ("complete", "running", "waiting", "failed")
SHOWN = 5
"""Complete trials whose figures are read: those that ended last."""


@dataclass(frozen=True)
class TrialView:
    """A trial as its files show it at a moment."""

    name: str
    folder: Path
    outcome: Outcome
    run: RunView | None = None
    """What it has recorded, where that was looked at."""

    @property
    def status(self) -> str:
        """One of `STATUSES`."""
        if self.outcome.status != "waiting":
            return self.outcome.status
        return "waiting" if self.run is None else "running"


@dataclass(frozen=True)
class StudyView:
    """A study as its files show it at a moment."""

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
        """Whether every trial has come to an end."""
        return not self.of_status("waiting") and not self.of_status("running")

    @property
    def status(self) -> str:
        if not self.over:
            return "running"
        return "failed" if self.of_status("failed") else "complete"

    @property
    def left(self) -> float:
        """Seconds until all are done, if those that wait take as long as those that are
        done took; NaN while nobody can tell.
        """
        running = self.of_status("running")
        rests = [_rest(trial) for trial in running]
        waiting = len(self.of_status("waiting"))
        took = [trial.outcome.seconds for trial in self.of_status("complete")]
        took = [seconds for seconds in took if not isnan(seconds)]
        if not took:
            return float("nan") if waiting else max(rests, default=float("nan"))
        # As many at a time as there are now.
        at_once = max(1, len(running))
        return max(rests, default=0.0) + waiting * mean(took) / at_once


def _rest(trial: TrialView) -> float:
    """Return the seconds that a running trial still takes; 0 while nobody knows."""
    left = float("nan") if trial.run is None else trial.run.left
    return 0.0 if isnan(left) else left


class StudyLooker:
    """Looks at a study again and again, and reads only what has changed."""

    def __init__(self) -> None:
        self._looker = Looker()
        self._ended: dict[str, TrialView] = {}
        """Complete trials, which change no more."""

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
            # Its log is there as soon as its processes are started.
            if holds_any_run(path):
                return self._with_run(trial)
            if path.with_suffix(".log").exists():
                return replace(trial, run=RunView(path))
        return trial

    def _with_run(self, trial: TrialView) -> TrialView:
        try:
            seen = replace(trial, run=self._looker.look(trial.folder))
        except UserError:
            # A record that cannot be read is told of by the trial's own end.
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
