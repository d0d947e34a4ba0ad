"""A campaign of faults against real runs: what is lost, what is corrupt, who hangs,
what else is touched.

One long run under mpirun is hit by a fault at a random moment, resumed, hit again, and
so on until it is complete. Then its numbers and its last state are compared, bit for
bit, to those of a run that nothing has interrupted, and the next run begins. A fault
that a run has to bear (a client's update is NaN, a rank is slow, the device is out of
memory) does not end its life; the uninterrupted run has the same NaN. Every fault is a
trial; one that came after the run's end is none.

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

Every round is told and on disk at once. Printed is for every kind: trials, rounds that
had been told, those of them that are not on disk, files that are damaged or cannot be
read, runs that had not ended after a minute, files outside the run's folder or users'
own that were touched, the longest time from a fault to the end, and in how many trials
the whole run was the uninterrupted one in the end. The exit code is 1 if anything was
lost, corrupt, hung, touched, different or otherwise not as it should be. Small disks
need root.

examples:
  python benchmarks/faults.py --trials 24
  python benchmarks/faults.py --trials 500 --minutes 60 --seed 1
  python benchmarks/faults.py --trials 5 --kinds kill,flip
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import canaries
import h5py
import numpy as np
from asides import ASIDE, Aside
from disks import fill, read_only, replace, small_disk
from lives import (
    HEADING,
    PATIENCE,
    STALL,
    WORK,
    Job,
    Tally,
    complete,
    differences,
    on_ranks,
)
from references import References, damage, pace

from hpcfed.experiment.stored import read_run
from hpcfed.record import checkpoints
from hpcfed.runtime.signals import STOPPED

PAUSE = 0.4
"""Seconds from a life's first round, or the last fault that it bore, to the next fault;
the mean.
"""
ENDING = (
    "kill",
    "killall",
    "term",
    "hang",
    "raise",
    "flip",
    "truncate",
    "disk",
    "unwritable",
    "links",
    "files",
)
BORNE = ("nan", "straggler", "memory", "suspend", "hangup")
KINDS = ENDING + BORNE + ASIDE
KILLED = ("killall", "flip", "truncate", "links", "files")
"""Kinds that begin with the end of all ranks."""
BESIDE = 2
"""Trials with runs of their own, of one process each, that run at a time."""


class Campaign:
    """Trials of all kinds in turn."""

    def __init__(
        self, kinds: list[str], *, trials: int, minutes: float, rounds: int, seed: int
    ) -> None:
        self.tallies = {kind: Tally() for kind in kinds}
        self._trials, self._rounds, self._seed = trials, rounds, seed
        self._begin = time.monotonic()
        self._end = self._begin + 60 * minutes
        self._chance = random.Random(seed)
        self._pending: deque[str] = deque()
        self._tried = 0
        self._chain: list[str] = []
        """The kinds of the faults that the present run has met."""
        self._laid: tuple[str, str] | None = None
        """The kind of fault that has put something into the folder before the present
        life, and what it is.
        """
        self._outside = Path()
        self._canaries: canaries.Snapshot = {}
        self._own: canaries.Snapshot = {}
        """The users' files in the folder."""
        self._handed_on = True
        """Whether a signal reaches the ranks as it is: to SIGTERM and SIGINT mpirun has
        an exit code of its own, and it kills ranks that have not ended after a second
        or so.
        """

    @property
    def done(self) -> int:
        return sum(tally.trials for tally in self.tallies.values())

    @property
    def enough(self) -> bool:
        return self.done >= self._trials or time.monotonic() > self._end

    def go(self, scratch: Path) -> None:
        self._asides = scratch / "asides"
        (self._asides / "references").mkdir(parents=True)
        self._references = References(self._asides / "references")
        for number in range(self._trials):
            self._go_aside()
            if self.enough:
                return
            if all(kind in ASIDE for kind in self.tallies):
                continue
            orders, disk = scratch / f"orders-{number}", scratch / f"disk-{number}"
            orders.mkdir()
            with small_disk(disk):
                self._chain, self._laid, self._own = [], None, {}
                self._outside = disk / "outside"
                self._build_canaries()
                if self._run(orders, disk):
                    self._compare(orders, disk)

    def _go_aside(self) -> None:
        """Do the trials of this turn that have runs of their own."""
        if not self._pending:
            self._refill()
        while not self.enough:
            kinds = [kind for kind in self._pending if kind in ASIDE][
                : min(BESIDE, self._trials - self.done)
            ]
            if not kinds:
                return
            with ThreadPoolExecutor(BESIDE) as pool:
                tallies = list(pool.map(self._aside, kinds))
            for kind, tally in zip(kinds, tallies, strict=True):
                where = f"--seed {self._seed}, trial {self.done + 1}, {kind}"
                tally.remarks = [f"{where}: {remark}" for remark in tally.remarks]
                self.tallies[kind].add(tally)
                for remark in tally.remarks:
                    print(remark, file=sys.stderr, flush=True)
                if tally.trials:
                    self._pending.remove(kind)
                    self._say(kind, tally.reported)

    def _aside(self, kind: str) -> Tally:
        self._tried += 1
        place = self._asides / f"{kind}-{self._tried}"
        return Aside(
            kind, place, random.Random(f"{self._seed} {place.name}"), self._references
        ).go()

    def _run(self, orders: Path, disk: Path) -> bool:
        """A run with as many lives as it takes; False if it cannot go on."""
        out, damaged = disk / "run", False
        words = [*WORK, "--rounds", str(self._rounds), "--out", str(out)]
        while True:
            withdraw(orders)
            job = Job(on_ranks(orders, words))
            try:
                job.begin()
                if self._laid and self._was_refused(job, out):
                    continue
                if not self._own and job.reported():
                    self._own = canaries.leave_own(out, canaries.OWN[:2])
                if damaged and "is damaged" not in job.told():
                    self._remark("nobody has noticed the damage", job)
                damaged = self._live(job, orders, out)
            finally:
                job.end()
            if job.process.returncode == 0 or complete(out):
                return True
            if not (out / "run.h5").exists() or not job.reported():
                self._remark("the run cannot go on", job)
                return False
            self._go_aside()
            words = [
                "run",
                "--resume",
                str(out),
                "--overwrite",
            ]  # a fault may have come before the first checkpoint

    def _live(self, job: Job, orders: Path, out: Path) -> bool:
        """One life of a run: faults that it bears, and at most one that ends it;
        whether a file is damaged then.
        """
        while not self.enough:
            time.sleep(min(5 * PAUSE, self._chance.expovariate(1 / PAUSE)))
            if not job.alive:
                break
            kind = self._next()
            if kind in BORNE and not (kind == "hangup" and self._chance.random() < 0.5):
                self._bear(kind, job, orders, out)
                if (
                    job.process.poll()
                ):  # it should not have ended, which is remarked already
                    self._look(out)
                    self._take_up(out)
                    return False
                continue
            return self._strike(kind, job, orders, out)
        if not job.wait(2 * PATIENCE):
            self._remark("it does not end", job)
        elif job.process.returncode:
            self._remark(
                f"it has ended with {job.process.returncode}, though nothing was done to it",
                job,
            )
        self._look(out)
        self._take_up(out)
        return False

    def _next(self) -> str:
        """The next kind for the run that is at work."""
        while not (kinds := [kind for kind in self._pending if kind not in ASIDE]):
            self._refill()
        return kinds[0]

    def _refill(self) -> None:
        kinds = list(self.tallies)
        self._chance.shuffle(kinds)
        self._pending.extend(kinds)

    def _count(self, kind: str, reported: int) -> Tally:
        """A trial that really was one."""
        self._pending.remove(kind)
        self._chain.append(kind)
        tally = self.tallies[kind]
        tally.trials += 1
        tally.reported += reported
        self._say(kind, reported)
        return tally

    def _say(self, kind: str, reported: int) -> None:
        each = (time.monotonic() - self._begin) / self.done
        left = min(each * (self._trials - self.done), self._end - time.monotonic())
        line = f"trial {self.done} of {self._trials}: {kind} in round {reported}; {each:.1f} s each"
        print(
            f"{line}, {max(0.0, left) / 60:.1f} min left", file=sys.stderr, flush=True
        )

    def _remark(
        self, text: str, job: Job | None = None, *, kind: str | None = None
    ) -> None:
        kind = kind or (self._chain[-1] if self._chain else next(iter(self.tallies)))
        where = f"--seed {self._seed}, trial {self.done}, {kind}"
        if job is not None:
            where += f" after round {job.reported()}, exit code {job.process.poll()}"
            text += "\n    " + "\n    ".join(job.told().splitlines()[-6:])
        self.tallies[kind].remarks.append(f"{where}: {text}")
        print(self.tallies[kind].remarks[-1], file=sys.stderr, flush=True)

    def _order(self, kind: str, orders: Path) -> Path:
        """For a rank, which sees all of it or nothing."""
        order = orders / f"order-{self._chance.randrange(2)}"
        temporary = orders / "unfinished"
        temporary.write_text(kind)
        temporary.rename(order)
        return order

    def _bear(self, kind: str, job: Job, orders: Path, out: Path) -> None:
        """A fault that must not end the run, and must be seen in its record some rounds
        later.
        """
        before = job.reported()
        if kind in ("suspend", "hangup"):
            if not self._signal(kind, job, orders):
                return
        else:
            order = self._order(kind, orders)
            if not job.until(lambda: not order.exists(), PATIENCE):
                return
        job.until(lambda: job.reported() > before + 5, PATIENCE)
        tally = self._count(kind, job.reported())
        if not job.alive and job.process.returncode:
            self._check(tally, job, out)
            self._remark("the run has ended", job)
            return
        with h5py.File(out / "run.h5") as file:
            found: bool = {
                "nan": lambda: np.nanmax(file["rounds/excluded"][before:]) == 1,
                "straggler": lambda: np.nanmax(file["rounds/imbalance"][before:]) > 1.5,
                "memory": lambda: (
                    np.nanmax(file["timing/halvings"][before:]) > 0
                    and "out of memory" in job.told()
                ),
                "suspend": lambda: job.reported() > before or complete(out),
                "hangup": lambda: job.reported() > before or complete(out),
            }[kind]()
        if not found:
            self._remark("nothing of it is in the record", job)

    def _signal(self, kind: str, job: Job, orders: Path) -> bool:
        """Halt all ranks for too long, or tell some that their terminal has gone;
        False: they had ended before.
        """
        if (
            kind == "suspend"
        ):  # in the midst of a phase that whoever looks out for stalls has seen begin
            pace(orders, 2.0)
            time.sleep(1.2)
        ranks = job.ranks()
        if kind == "hangup" and self._chance.random() < 0.5:
            ranks = ranks[:1]
        with contextlib.suppress(ProcessLookupError):
            for rank in ranks:
                os.kill(rank, signal.SIGHUP if kind == "hangup" else signal.SIGSTOP)
        if kind == "suspend" and ranks:
            time.sleep(STALL + self._chance.uniform(0.3, 1.0))
            with contextlib.suppress(ProcessLookupError):
                for rank in ranks:
                    os.kill(rank, signal.SIGCONT)
        pace(orders, 0)
        return bool(ranks)

    def _strike(self, kind: str, job: Job, orders: Path, out: Path) -> bool:
        """A fault that ends the run; whether a file is damaged in a way that the next
        life must notice.
        """
        begin, mend = time.monotonic(), self._inject(kind, job, orders, out)
        ended = job.wait(PATIENCE)
        seconds, code, reported = (
            time.monotonic() - begin,
            job.process.returncode,
            job.reported(),
        )
        mend()
        if self._laid:
            self._look(out)
            self._take_up(out)
        if code == 0 or complete(out):  # it was so before the fault
            return False
        target = self._target(out) if kind in ("flip", "truncate") else None
        if (
            kind in ("flip", "truncate") and target is None
        ):  # nothing there yet that may be damaged
            return False
        tally = self._count(kind, reported)
        tally.hangs += not ended
        tally.slowest = max(tally.slowest, seconds)
        asked = kind == "term" and self._handed_on
        if (asked and code != STOPPED) or (
            kind not in ("term", "hangup") and code == STOPPED
        ):
            self._remark("not the exit code that it should be", job)
        self._check(tally, job, out, stopped=asked)
        self._look(out)
        if kind in ("links", "files"):
            if self._chance.random() < 0.5:
                self._overwrite(kind, out)
            else:
                shutil.copytree(out, out.with_name("backup"))
                self._lay(kind, out)
        if target is None:
            return False
        damage(target, self._chance, cut=kind == "truncate")
        return target.suffix == ".npy"

    def _check(
        self, tally: Tally, job: Job, out: Path, *, stopped: bool = False
    ) -> None:
        """Count what is lost or corrupt in the folder of a run that has ended."""
        try:
            record = read_run(out)
            tally.lost += max(0, job.reported() - int(record.rounds_done))
            if stopped and record.status != "stopped":
                self._remark(f"its status is {record.status}", job)
            bad: list[str] = []
            checkpoints.newest(out, say=bad.append)
            tally.corrupt += len(bad)
            for text in bad:
                self._remark(text, job)
        except Exception as error:
            tally.corrupt += 1
            self._remark(f"{type(error).__name__}: {error}", job)

    def _lay(self, kind: str, run: Path, *, how: str = "--resume") -> None:
        """Put links, FIFOs or users' own files into a run's folder."""
        if kind == "files":
            self._own = canaries.leave_own(run)
            self._laid = kind, f"{how}, users' files"
            return
        entry, form = canaries.pick(self._chance)
        canaries.plant(run, entry, form, self._outside)
        self._canaries = canaries.snapshot(self._outside)
        self._laid = kind, f"{how}, {entry} as {form}"

    def _was_refused(self, job: Job, out: Path) -> bool:
        """Return whether a resume was refused for what was laid in the folder, which is
        then as it was before.
        """
        if job.reported() or job.process.poll() == 0:
            return False
        self._judge(job)
        self._look(out)
        canaries.remove(out)
        out.with_name("backup").rename(out)
        self._take_up(out)
        return True

    def _judge(self, job: Job) -> None:
        """Look at a run that has not gone on over what was laid in its folder: it
        should have been refused.
        """
        assert self._laid is not None
        kind, laid = self._laid
        if job.alive:
            job.end()
            self.tallies[kind].hangs += 1
            self._remark(f"{laid}: it hangs", job, kind=kind)
        elif job.process.returncode and job.refusal() is None:
            self._remark(
                f"{laid}: neither refused in one line nor passed over", job, kind=kind
            )

    def _overwrite(self, kind: str, out: Path) -> None:
        """Have a copy of the folder overwritten by another run."""
        again, own = out.with_name("again"), self._own
        shutil.copytree(out, again)
        self._own = canaries.own(again)
        self._lay(kind, again, how="--overwrite")
        job = Job(
            [
                sys.executable,
                "-m",
                "hpcfed",
                *WORK,
                "--rounds",
                "3",
                "--out",
                str(again),
                "--overwrite",
            ]
        )
        job.until(lambda: False, PATIENCE)
        self._judge(job)
        self._look(again)
        self._take_up(again)
        canaries.remove(again)
        self._own = own

    def _look(self, run: Path) -> None:
        """Count canaries and users' files that are not as they were."""
        there = canaries.own(run)
        own = {path: facts for path, facts in there.items() if path in self._own}
        names = canaries.touched(self._canaries, canaries.snapshot(self._outside))
        names += canaries.touched(self._own, own)
        self._own = own
        if names:
            kind, laid = self._laid or (self._chain[-1], "nothing laid")
            self.tallies[kind].touched += len(names)
            self._remark(f"{laid}: touched {', '.join(names)}", kind=kind)
            self._build_canaries()

    def _take_up(self, run: Path) -> None:
        """Take away the links and FIFOs that were laid in a folder; users' files stay."""
        self._laid = None
        canaries.clear(run)
        canaries.remove(run.with_name("backup"))
        self._build_canaries()

    def _build_canaries(self) -> None:
        canaries.build(self._outside)
        self._canaries = canaries.snapshot(self._outside)

    def _inject(
        self, kind: str, job: Job, orders: Path, out: Path
    ) -> Callable[[], None]:
        """Does it, and returns what undoes it once the run has ended."""
        chance, ranks = self._chance, job.ranks()
        with contextlib.suppress(ProcessLookupError, IndexError):
            match kind:
                case "kill":
                    os.kill(chance.choice(ranks), signal.SIGKILL)
                case _ if kind in KILLED:
                    for rank in ranks:
                        os.kill(rank, signal.SIGKILL)
                case "term":
                    number = chance.choice(
                        (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
                    )
                    targets = chance.choice(
                        ([job.process.pid], ranks, [chance.choice(ranks)])
                    )
                    self._handed_on = number == signal.SIGUSR2 or targets != [
                        job.process.pid
                    ]
                    for target in targets:
                        os.kill(target, number)
                case "hangup":
                    os.kill(job.process.pid, signal.SIGHUP)
                case "hang":
                    os.kill(chance.choice(ranks), signal.SIGSTOP)
                case "raise":
                    self._order(kind, orders)
                case "disk":
                    return fill(out.parent)
                case "unwritable":
                    return chance.choice((replace, read_only))(out, job)
        return lambda: None

    def _target(self, out: Path) -> Path | None:
        """A file whose damage can be borne: there must be another checkpoint."""
        whole = sorted(
            path.parent for path in out.glob(f"checkpoints/*/{checkpoints.MARKER}")
        )
        files = [out / "run.h5"] if whole else []
        if len(whole) > 1 and (not files or self._chance.random() < 0.7):
            files = sorted(whole[-1].iterdir())
        return self._chance.choice(files) if files else None

    def _compare(self, orders: Path, disk: Path) -> None:
        """With a run that was not interrupted; what is found holds for all faults of
        the run.
        """
        withdraw(orders)
        (orders / "reference").touch()
        whole = disk / "whole"
        job = Job(
            on_ranks(
                orders, [*WORK, "--rounds", str(self._rounds), "--out", str(whole)]
            )
        )
        try:
            if not job.wait(2 * PATIENCE) or job.process.returncode:
                self._remark("the uninterrupted run does not work", job)
                return
            different = differences(whole, disk / "run")
        finally:
            job.end()
        if different:
            planted = (
                (orders / "ledger").read_text().split("\n")
                if (orders / "ledger").exists()
                else []
            )
            text = f"different from an uninterrupted run: {', '.join(different)}; faults {' '.join(self._chain)}"
            self._remark(f"{text}; planted {', '.join(planted)}")
        for kind in self._chain:
            self.tallies[kind].compared += 1
            self.tallies[kind].same += not different


def withdraw(orders: Path) -> None:
    """Orders that came too late for the run that they were meant for."""
    for order in orders.glob("order-*"):
        order.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trials",
        type=int,
        default=24,
        help="in all; the kinds take turns (default: 24)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        help="end after these, whatever is left",
    )
    parser.add_argument(
        "--rounds", type=int, default=200, help="of a run (default: 200)"
    )
    parser.add_argument(
        "--kinds", default=",".join(KINDS), help="of " + ", ".join(KINDS)
    )
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    kinds = asked.kinds.split(",")
    if strange := set(kinds) - set(KINDS):
        parser.error(f"unknown kind {sorted(strange)[0]}; there are {', '.join(KINDS)}")
    campaign = Campaign(
        kinds,
        trials=asked.trials,
        minutes=asked.minutes,
        rounds=asked.rounds,
        seed=asked.seed,
    )
    interrupted = False
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # the disk must not stay, nor the table be lost
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
