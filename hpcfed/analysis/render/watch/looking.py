"""Watching a run in progress only through its files, so it may be on another
machine.

`run.h5` is replaced whole, so it can be read at any time. It is read again only if it
has changed. The signs of life beside it say what the run is doing in between.
"""

import time
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import mean

import numpy as np

from hpcfed.errors import UserError, command_line, printable
from hpcfed.options.metrics import HEADLINES
from hpcfed.results.claim import begun_by, is_abandoned, is_at_work, is_held
from hpcfed.results.folder import (
    CHECKPOINTS,
    CLAIM,
    LEARNING,
    RECORD,
    SIGN,
    failures,
    holds_run,
    runs,
    seed_folders,
)
from hpcfed.results.pace import pace, recent, rest
from hpcfed.results.run import RunRecord
from hpcfed.results.sandbox import try_out
from hpcfed.results.signs import EVERY, LearningSign, RunSign, read_sign
from hpcfed.results.stored import first_failure, read_run, timed_run
from hpcfed.runtime.timer import PHASES
from hpcfed.words import duration

SILENT = 5 * EVERY
"""Seconds without a sign of life that are worth mentioning."""
LOST = 600.0
"""Seconds of silence after which a run counts as dead, if no process here writes to it:
shared file systems show files late, but not by minutes.
"""


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
    held: bool = False
    """Whether a process on this machine writes to it."""
    error: str = ""
    """Why it has failed before it recorded anything."""

    @property
    def status(self) -> str:
        """The common status of the seeds, else the most important one."""
        found = {record.status for record in self.records}
        if self.error:
            return "failed"
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
    def lost(self) -> bool:
        """Whether its process must have died without a word."""
        return not self.over and not self.held and self.age > LOST

    @property
    def planned(self) -> int:
        # A seed may have been made longer than the others.
        return int(self.timed.config["rounds"]) if self.records else 0

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
    def timed(self) -> RunRecord:
        """The run with the times of the process: of seeds that advance together, one
        that has not ended before the others.
        """
        at_work = [one for one in self.records if one.status == self.status]
        return timed_run(at_work or self.records)

    @property
    def pace(self) -> float:
        """Current seconds per round; NaN before the first."""
        return pace(self._seconds())

    @property
    def left(self) -> float:
        """Seconds that the remaining rounds will take; NaN if unknown."""
        return rest(self._seconds(), self.planned - self.done)

    def _seconds(self) -> np.ndarray:
        """Return the seconds of all rounds on these ranks, beside as many runs."""
        if not self.records:
            return np.empty(0)
        return self.timed.rounds["seconds"][self.timed.untimed :]

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
        return recent(self.timed.phases[self.timed.untimed :])


class Looker:
    """Watches runs repeatedly, and reads only what has changed."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[int, float]] = {}
        """When a file was last changed, by its own clock, and when we noticed."""
        self._records: dict[Path, tuple[object, RunRecord]] = {}

    def look(self, folder: Path) -> RunView:
        """Look at the folder of a run or of its seeds."""
        found = [run for run in runs(folder) if (run / RECORD).is_file()]
        held = is_at_work(folder) or is_held(log_of(folder))
        signs = [folder / SIGN]
        if not found:
            # What a run leaves before its record.
            signs += [folder, log_of(folder), folder / CLAIM]
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
            held=held,
            error="" if found or held else _error(folder),
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


def log_of(folder: Path) -> Path:
    """Return where a study keeps what the run in a folder prints."""
    return folder.with_name(f"{folder.name}.log")


def error_files(folder: Path) -> list[Path]:
    """Return the files in which ranks of a run, or of its seeds, have left errors."""
    found = []
    for run in (folder, *seed_folders(folder)):
        found += failures(run)
    return found


def _error(folder: Path) -> str:
    """Return the first error of a run, or of a seed of it; empty without one."""
    found = error_files(folder)
    return first_failure(found[0].parent) or "" if found else ""


def unrecorded(view: RunView) -> str:
    """Return why a run has no record: it starts, it has failed, or its process or record
    is gone; since when nothing has happened, and where to look.
    """
    folder = printable(str(view.folder))
    if view.error:
        return f"it failed before its first round: {printable(view.error)}"
    text = "a run is starting; it has recorded nothing yet"
    if not view.held:
        text = f"there is no {RECORD}, and no process here is writing one"
    if view.age > SILENT:
        text += f"; nothing has happened for {duration(view.age)}"
    if view.held:
        return text
    log, job = log_of(view.folder), begun_by(view.folder)
    if log.is_file():
        text += f"; look at {printable(str(log))}"
    elif job is not None:
        text += f"; look at the log of job {printable(job)}"
    if (view.folder / CHECKPOINTS).is_dir():
        go_on = command_line("run", "--resume", folder)
        text += f"; go on from its checkpoint: {go_on}"
    return text


def learns_at_end(record: RunRecord) -> bool:
    """Tell whether the server's model has yet to learn after the last round."""
    has_server = "bank_rounds" in record.config
    waits = not record.config.get("server_overlap")
    return has_server and waits and record.rounds_done < record.config["rounds"]
