"""Inject faults into real runs, and count what is lost, corrupt, hung or touched.

One long run under mpirun is hit by a fault at a random moment, resumed, hit again, and
so on until it is complete. Then its numbers and its last state are compared, bit for
bit, to those of a run that nothing has interrupted, and the next run begins. A fault
that a run has to bear (a client's update is NaN, a rank is slow, the device is out of
memory) does not end its life; the uninterrupted run has the same NaN. Every fault is a
trial, unless it came after the run's end.

  kill, killall         a rank, all ranks get SIGKILL
  term                  SIGTERM, SIGINT or SIGUSR2 to mpirun, to a rank or to all: exit code 75 (or mpirun's own)
  hang                  a rank is halted; the others give up waiting for it
  raise                 a rank's training raises
  flip, truncate        all ranks are killed, and a file of the newest checkpoint, or run.h5, is damaged
  disk                  no space is left
  unwritable            the disk is read-only, or a file is where the folder was
  nan, straggler, memory
  suspend               all ranks are halted for longer than --stall-timeout, and then go on
  hangup                SIGHUP to ranks, which take no notice, or to mpirun, which ends them
  links                 all ranks are killed, and an entry of the folder becomes a link to files outside, or a FIFO;
                        --resume, or --overwrite of a copy, refuses it in one line or passes it over
  files                 all ranks are killed, and users' own files are in the folder of --resume, or of --overwrite

Other trials have short runs of their own:

  hangup-alone          SIGHUP to a run without mpirun
  study                 a study is killed, with its run or without, and started again: every point is there once
  requeue               slurm/run.sbatch is queued again twice; or it finds another job's folder, and leaves it alone
  seeds                 one of two seeds lacks its newest checkpoint, or has it damaged
  twice                 a second --resume or --overwrite of a folder, or of its seed-0, while the first run is at work

Runs report every round, and have it on disk, at once. The table shows for every kind:
trials, rounds that runs had reported, those of them that are not on disk (lost), files
that are damaged or cannot be read (corrupt), runs that had not ended after a minute
(hangs), files outside the run's folder or users' own that were touched, the longest
time from a fault to the end, and in how many trials the run ended up the same as the
uninterrupted one. The exit code is 1 if anything was lost, corrupt, hung, touched,
different or otherwise not as it should be. Small disks need root.

examples:
  python -m benchmarks.faults --trials 24
  python -m benchmarks.faults --trials 500 --minutes 60 --seed 1
  python -m benchmarks.faults --trials 5 --kinds kill,flip
"""

import random
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np

from benchmarks.arguments import parser_of
from benchmarks.faults import canaries, injections
from benchmarks.faults.asides import ASIDE, Aside
from benchmarks.faults.disks import small_disk
from benchmarks.faults.lives import (
    HEADING,
    PATIENCE,
    WORK,
    Job,
    Tally,
    complete,
    count_losses,
    differences,
    on_ranks,
)
from benchmarks.faults.references import References, damage
from benchmarks.faults.schedule import Schedule
from benchmarks.faults.traps import Traps
from hpcfed.runtime.signals import STOPPED

PAUSE = 0.4
"""Mean seconds from a life's first round, or from the last fault that it bore, to the
next fault.
"""
ENDING = (
    "kill", "killall", "term", "hang", "raise", "flip", "truncate", "disk", "unwritable",
    "links", "files",
)  # fmt: skip
"""Kinds of faults that end a run's life."""
BORNE = ("nan", "straggler", "memory", "suspend", "hangup")
"""Kinds of faults that a run has to bear."""
KINDS = ENDING + BORNE + ASIDE
BESIDE = 2
"""Trials with runs of their own, of one process each, that run at a time."""


class Campaign:
    """Trials of all kinds in turn."""

    def __init__(
        self, kinds: list[str], *, trials: int, minutes: float, rounds: int, seed: int
    ) -> None:
        self._trials, self._rounds, self._seed = trials, rounds, seed
        self._chance = random.Random(seed)
        self._schedule = Schedule(
            kinds, trials=trials, minutes=minutes, chance=self._chance
        )
        self.tallies = self._schedule.tallies
        self._tried = 0
        self._chain: list[str] = []
        """The kinds of the faults that the present run has met, in order."""

    def go(self, scratch: Path) -> None:
        self._asides = scratch / "asides"
        (self._asides / "references").mkdir(parents=True)
        self._references = References(self._asides / "references")
        for number in range(self._trials):
            self._go_aside()
            if self._schedule.enough:
                return
            if all(kind in ASIDE for kind in self.tallies):
                continue
            orders, disk = scratch / f"orders-{number}", scratch / f"disk-{number}"
            orders.mkdir()
            with small_disk(disk):
                self._chain = []
                self._traps = Traps(
                    disk / "outside", self._chance, self.tallies, self._remark
                )
                if self._run(orders, disk):
                    self._compare(orders, disk)

    def _go_aside(self) -> None:
        """Do the trials of this turn that have runs of their own."""
        while not self._schedule.enough:
            kinds = self._schedule.asides(BESIDE)
            if not kinds:
                return
            with ThreadPoolExecutor(BESIDE) as pool:
                tallies = list(pool.map(self._aside, kinds))
            for kind, tally in zip(kinds, tallies, strict=True):
                where = f"--seed {self._seed}, trial {self._schedule.done + 1}, {kind}"
                tally.remarks = [f"{where}: {remark}" for remark in tally.remarks]
                self.tallies[kind].add(tally)
                for remark in tally.remarks:
                    print(remark, file=sys.stderr, flush=True)
                if tally.trials:
                    self._schedule.tick_off(kind, tally.reported)

    def _aside(self, kind: str) -> Tally:
        self._tried += 1
        folder = self._asides / f"{kind}-{self._tried}"
        chance = random.Random(f"{self._seed} {folder.name}")
        return Aside(kind, folder, chance, self._references).go()

    def _run(self, orders: Path, disk: Path) -> bool:
        """Give a run as many lives as it takes; return False if it cannot go on."""
        out, damaged = disk / "run", False
        words = [*WORK, "--rounds", str(self._rounds), "--out", str(out)]
        while True:
            injections.withdraw(orders)
            job = Job(on_ranks(orders, words))
            try:
                job.begin()
                if self._traps.laid and self._traps.was_refused(job, out):
                    continue
                if not self._traps.users_files and job.reported():
                    self._traps.users_files = canaries.leave_own(out, canaries.OWN[:2])
                if damaged and "is damaged" not in job.told():
                    self._remark("the damage was not noticed", job)
                damaged = self._live(job, orders, out)
            finally:
                job.end()
            if job.process.returncode == 0 or complete(out):
                return True
            if not (out / "run.h5").exists() or not job.reported():
                self._remark("the run cannot go on", job)
                return False
            self._go_aside()
            # --overwrite, because a fault may have come before the first checkpoint.
            words = ["run", "--resume", str(out), "--overwrite"]

    def _live(self, job: Job, orders: Path, out: Path) -> bool:
        """Let a run live through faults that it bears, and at most one that ends it;
        return whether a file is damaged then.
        """
        while not self._schedule.enough:
            time.sleep(min(5 * PAUSE, self._chance.expovariate(1 / PAUSE)))
            if not job.alive:
                break
            kind = self._schedule.next()
            if kind in BORNE and not (kind == "hangup" and self._chance.random() < 0.5):
                self._bear(kind, job, orders, out)
                if job.process.poll():  # a remark says so already
                    self._look(out)
                    self._traps.take_up(out)
                    return False
                continue
            return self._strike(kind, job, orders, out)
        if not job.wait(2 * PATIENCE):
            self._remark("it does not end", job)
        elif job.process.returncode:
            code = job.process.returncode
            self._remark(
                f"it has ended with {code}, though nothing was done to it", job
            )
        self._look(out)
        self._traps.take_up(out)
        return False

    def _count(self, kind: str, reported: int) -> Tally:
        """Count a trial that really was one: the fault came in time."""
        self._chain.append(kind)
        tally = self.tallies[kind]
        tally.trials += 1
        tally.reported += reported
        self._schedule.tick_off(kind, reported)
        return tally

    def _remark(
        self, text: str, job: Job | None = None, *, kind: str | None = None
    ) -> None:
        kind = kind or self._last_kind()
        where = f"--seed {self._seed}, trial {self._schedule.done}, {kind}"
        if job is not None:
            where += f" after round {job.reported()}, exit code {job.process.poll()}"
            text += "\n    " + "\n    ".join(job.told().splitlines()[-6:])
        self.tallies[kind].remarks.append(f"{where}: {text}")
        print(self.tallies[kind].remarks[-1], file=sys.stderr, flush=True)

    def _bear(self, kind: str, job: Job, orders: Path, out: Path) -> None:
        """Do what must not end the run, and must be seen in its record some rounds
        later.
        """
        before = job.reported()
        if kind == "suspend":
            happened = injections.suspend(job, orders, self._chance)
        elif kind == "hangup":
            happened = injections.hang_up(job, orders, self._chance)
        else:
            order = injections.order(kind, orders, self._chance)
            happened = job.until(lambda: not order.exists(), PATIENCE)
        if not happened:
            return
        job.until(lambda: job.reported() > before + 5, PATIENCE)
        tally = self._count(kind, job.reported())
        if not job.alive and job.process.returncode:
            self._check(tally, job, out)
            self._remark("the run has ended", job)
            return
        found = job.reported() > before or complete(out)
        with h5py.File(out / "run.h5") as file:
            if kind == "nan":
                found = np.nanmax(file["rounds/excluded"][before:]) == 1
            elif kind == "straggler":
                found = np.nanmax(file["rounds/imbalance"][before:]) > 1.5
            elif kind == "memory":
                halved = np.nanmax(file["timing/halvings"][before:]) > 0
                found = halved and "out of memory" in job.told()
        if not found:
            self._remark("nothing of it is in the record", job)

    def _strike(self, kind: str, job: Job, orders: Path, out: Path) -> bool:
        """Do what ends the run; return whether a file is damaged in a way that the next
        life must notice.
        """
        begin = time.monotonic()
        asked, mend = False, _nothing
        if kind == "term":
            asked = injections.ask_to_stop(job, self._chance)
        else:
            mend = injections.inject(kind, job, orders, out, self._chance)
        ended = job.wait(PATIENCE)
        seconds = time.monotonic() - begin
        code = job.process.returncode
        mend()
        if self._traps.laid:
            self._look(out)
            self._traps.take_up(out)
        if code == 0 or complete(out):  # it was so before the fault
            return False
        target = None
        if kind in ("flip", "truncate"):
            target = injections.damageable(out, self._chance)
            if target is None:
                return False
        tally = self._count(kind, job.reported())
        tally.hangs += not ended
        tally.slowest = max(tally.slowest, seconds)
        # Only a run that was asked to stop may say that it has stopped. mpirun may
        # answer with its own code, and a lost terminal may look like a request.
        unasked = kind not in ("term", "hangup") and code == STOPPED
        if unasked or (asked and code != STOPPED):
            self._remark("not the exit code that it should be", job)
        self._check(tally, job, out, stopped=asked)
        self._look(out)
        if kind in ("links", "files"):
            if self._chance.random() < 0.5:
                self._traps.lay_for_overwrite(kind, out)
            else:
                self._traps.lay_for_resume(kind, out)
        if target is None:
            return False
        damage(target, self._chance, cut=kind == "truncate")
        return target.suffix == ".npy"

    def _check(
        self, tally: Tally, job: Job, out: Path, *, stopped: bool = False
    ) -> None:
        for remark in count_losses(tally, job, out, stopped=stopped):
            self._remark(remark, job)

    def _look(self, out: Path) -> None:
        """Count files outside, or users' own, that are not as they were."""
        self._traps.look(out, self._last_kind())

    def _last_kind(self) -> str:
        """Return the kind of the run's last fault; any kind where it has met none."""
        return self._chain[-1] if self._chain else next(iter(self.tallies))

    def _compare(self, orders: Path, disk: Path) -> None:
        """Compare the run with one that was not interrupted; what is found holds for
        all faults of the run.
        """
        injections.withdraw(orders)
        (orders / "reference").touch()
        whole = disk / "whole"
        words = [*WORK, "--rounds", str(self._rounds), "--out", str(whole)]
        job = Job(on_ranks(orders, words))
        try:
            if not job.wait(2 * PATIENCE) or job.process.returncode:
                self._remark("the uninterrupted run does not work", job)
                return
            different = differences(whole, disk / "run")
        finally:
            job.end()
        if different:
            ledger, planted = orders / "ledger", ""
            if ledger.exists():
                planted = ", ".join(ledger.read_text().split("\n"))
            text = f"different from an uninterrupted run: {', '.join(different)}"
            faults = " ".join(self._chain)
            self._remark(f"{text}; faults {faults}; planted {planted}")
        for kind in self._chain:
            self.tallies[kind].compared += 1
            self.tallies[kind].same += not different


def _nothing() -> None:
    """Undo nothing."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--trials",
        type=int,
        default=24,
        help="trials in all; the kinds take turns (default: 24)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        help="end after this number of minutes, even if trials are left",
    )
    parser.add_argument(
        "--rounds", type=int, default=200, help="rounds of a run (default: 200)"
    )
    every = ", ".join(KINDS)
    parser.add_argument("--kinds", default=every, help=f"kinds of faults, of {every}")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    kinds = asked.kinds.replace(" ", "").split(",")
    if strange := set(kinds) - set(KINDS):
        parser.error(f"unknown kind {sorted(strange)[0]}; there are {every}")
    sizes = {"trials": asked.trials, "rounds": asked.rounds, "seed": asked.seed}
    campaign = Campaign(kinds, minutes=asked.minutes, **sizes)
    interrupted = False
    # SIGTERM ends as Ctrl-C does: the disk must not stay, nor the table be lost.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            campaign.go(Path(scratch))
        except KeyboardInterrupt:
            interrupted = True
    print(HEADING)
    for kind, tally in campaign.tallies.items():
        print(tally.line(kind))
    for tally in campaign.tallies.values():
        for remark in tally.remarks:
            print(remark)
    if interrupted:
        sys.exit(130)
    sys.exit(0 if all(tally.clean for tally in campaign.tallies.values()) else 1)


if __name__ == "__main__":
    main()
