"""Watching a run or a study in progress only through its files, so it may be on another
machine.

`run.h5` is replaced whole, so it can be read at any time. It is read again only if it
has changed. The signs of life beside it say what the run is doing in between.
"""

import socket
import time
from dataclasses import dataclass, replace
from math import isnan, nan
from pathlib import Path
from statistics import mean

import numpy as np

from hpcfed.errors import UserError
from hpcfed.options.metrics import HEADLINES
from hpcfed.results.claim import is_abandoned, is_study_abandoned
from hpcfed.results.folder import (
    LEARNING,
    PLAN,
    POINTS,
    RECORD,
    SIGN,
    STUDY,
    failures,
    holds_run,
    runs,
    seed_folders,
)
from hpcfed.results.pace import pace, recent, rest
from hpcfed.results.run import RunRecord
from hpcfed.results.sandbox import try_out
from hpcfed.results.signs import EVERY, LearningSign, RunSign, read_sign
from hpcfed.results.stored import read_run
from hpcfed.results.study import Outcome, read_listing, read_outcome
from hpcfed.runtime.timer import PHASES

SILENT = 5 * EVERY
"""Seconds without a sign of life that are worth mentioning."""


@dataclass(frozen=True)
class RunView:
    """A run, or its seeds, as its files show it at one moment."""

    folder: Path
    records: tuple[RunRecord, ...] = ()
    """One for each seed; empty while the run is starting."""
    sign: RunSign | None = None
    learning: LearningSign | None = None
    age: float = nan
    """Seconds since the last sign of life."""

    @property
    def status(self) -> str:
        """The common status of the seeds, else the most important one."""
        found = {record.status for record in self.records}
        for status in ("failed", "interrupted", "running", "stopped", "complete"):
            if status in found:
                return status
        return "starting"

    @property
    def over(self) -> bool:
        """Whether nothing more will happen."""
        return self.status not in ("starting", "running")

    @property
    def silent(self) -> bool:
        """Whether a run that should be active shows no sign of life."""
        return not self.over and self.age > SILENT

    @property
    def planned(self) -> int:
        return int(self.records[0].config["rounds"]) if self.records else 0

    @property
    def done(self) -> int:
        """Rounds that all seeds at work have done, which may be a round apart; others
        have ended early.
        """
        rounds = [one.rounds_done for one in self.records if one.status == self.status]
        ends = max if self.status == "complete" else min
        return ends(rounds, default=0)

    @property
    def metric(self) -> str:
        """The main metric of the task."""
        return HEADLINES[self.records[0].task]

    def series(self, name: str) -> np.ndarray:
        """Return the mean of a series over the seeds that have a value in a round."""
        total, known = np.zeros(self.done), np.zeros(self.done)
        for values in self._values(name):
            there = ~np.isnan(values)
            total[: len(values)][there] += values[there]
            known[: len(values)] += there
        return np.divide(total, known, out=np.full(self.done, nan), where=known > 0)

    def _values(self, name: str) -> list[np.ndarray]:
        """Return a series of every seed, which may have ended early."""
        found = [record.rounds.get(name, np.empty(0)) for record in self.records]
        return [values[: self.done] for values in found]

    def last(self, name: str) -> float:
        """Return the mean of every seed's latest known value; NaN without any."""
        known = [values[~np.isnan(values)] for values in self._values(name)]
        lasts = [float(values[-1]) for values in known if len(values)]
        return mean(lasts) if lasts else nan

    @property
    def pace(self) -> float:
        """Current seconds per round; NaN before the first."""
        return pace(self.series("seconds"))

    @property
    def left(self) -> float:
        """Seconds that the remaining rounds will take; NaN if unknown."""
        return rest(self.series("seconds"), self.planned - self.done)

    def phases(self) -> dict[str, float]:
        """Return the mean seconds of a recent round by phase, longest first."""
        phases = self._recent_phases()
        if not len(phases):
            return {}
        means = phases.mean((0, 1))
        found = dict(zip(PHASES, means.tolist(), strict=True))
        longest_first = sorted(found.items(), key=lambda item: -item[1])
        return {name: seconds for name, seconds in longest_first if seconds > 0}

    def slowest(self) -> tuple[int, float] | None:
        """Return the rank whose recent training takes longest, and its time divided by
        the mean over ranks; None with a single rank.
        """
        phases = self._recent_phases()
        if not len(phases) or phases.shape[1] < 2:
            return None
        of_ranks = phases[:, :, PHASES.index("train")].mean(0)
        mean = float(of_ranks.mean())
        if not mean > 0:
            return None
        rank = int(of_ranks.argmax())
        return rank, float(of_ranks[rank]) / mean

    def _recent_phases(self) -> np.ndarray:
        """Return the phases of the rounds whose pace is shown: [rounds, ranks,
        phases].
        """
        if not self.records:
            return np.empty((0, 0, 0))
        # Stacked seeds share their time, so the first one represents all.
        phases = self.records[0].phases
        return recent(phases[~np.isnan(phases).any((1, 2))])


class Looker:
    """Watches runs repeatedly, and reads only what has changed."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[int, float]] = {}
        """When a file was last changed, by its own clock, and when we noticed."""
        self._records: dict[Path, tuple[object, RunRecord]] = {}

    def look(self, folder: Path) -> RunView:
        """Look at the folder of a run or of its seeds."""
        found = [run for run in runs(folder) if (run / RECORD).is_file()]
        signs = [folder / SIGN]
        for run in found:
            signs += [run / RECORD, run / LEARNING]
        age = min(map(self._age, signs))
        read = (self._read(run, age) for run in found)
        records = [record for record in read if record is not None]
        learnings = [read_sign(run / LEARNING, LearningSign) for run in found]
        return RunView(
            folder=folder,
            records=tuple(sorted(records, key=lambda one: one.facts["seed"])),
            sign=read_sign(folder / SIGN, RunSign),
            # The server learns for one seed after the other.
            learning=next(filter(None, learnings), None),
            age=nan if age == float("inf") else age,
        )

    def _age(self, path: Path) -> float:
        """Return for how many seconds a file has not changed; infinite if it does not
        exist.

        Another machine's clock may be wrong. So count on our own clock from the moment
        we saw the file change. Only for a file not yet seen to change is its own time
        all we have.
        """
        try:
            changed = path.stat().st_mtime_ns
        except OSError:
            return float("inf")
        now = time.monotonic()
        before = self._seen.get(path)
        if before is None:
            since = max(0.0, time.time() - changed / 1e9)
            self._seen[path] = changed, now - since
        elif before[0] != changed:
            self._seen[path] = changed, now
        return now - self._seen[path][1]

    def _read(self, run: Path, age: float) -> RunRecord | None:
        """Read a run's record if something about it has changed; None if it has just
        been removed.
        """
        path = run / RECORD
        try:
            found = path.stat()
            # The error file of a failed rank, or a claim without an owner, ends a run
            # even if its record does not say so.
            gone = age > SILENT and is_abandoned(run)
            now = (found.st_mtime_ns, found.st_ino, len(failures(run)), gone)
            before = self._records.get(run)
            if before is None or before[0] != now:
                # A damaged record can crash HDF5, so a child process opens it first.
                try_out([path])
                self._records[run] = now, read_run(run)
        except FileNotFoundError:
            return None
        except UserError:
            # A run that begins anew removes its record before it writes the next.
            if path.exists():
                raise
            return None
        return self._records[run][1]


def holds_any_run(folder: Path) -> bool:
    """Tell whether a run, or a seed of one, has begun in a folder."""
    return any(map(holds_run, (folder, *seed_folders(folder))))


def learns_at_end(record: RunRecord) -> bool:
    """Tell whether the server's model has yet to learn after the last round."""
    has_server = "bank_rounds" in record.config
    waits = not record.config.get("server_overlap")
    return has_server and waits and record.rounds_done < record.config["rounds"]


# A study: which of its trials are waiting, running, done or failed.

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
        if self.run is None:
            return "waiting"
        if self.abandoned and self.run.status == "starting":
            return "stopped"
        # One that goes on says so within seconds.
        ended = self.run.status in ("stopped", "interrupted")
        return "stopped" if ended and self.run.age > SILENT else "running"


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
