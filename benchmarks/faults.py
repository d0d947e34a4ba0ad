"""A campaign of faults against real runs under mpirun: what is lost, what is corrupt, who hangs.

One long run is hit by a fault at a random moment, resumed, hit again, and so on until it is complete. Then its numbers
and its last state are compared, bit for bit, to those of a run that nothing has interrupted, and the next run begins.
A fault that a run has to bear (a client's update is NaN, a rank is slow, the device is out of memory) does not end its
life; the uninterrupted run has the same NaN. Every fault is a trial; one that came after the run's end is none.

  kill, killall         a rank, all ranks get SIGKILL
  term                  SIGTERM, SIGINT or SIGUSR2 to mpirun, to a rank or to all: exit code 75 (or mpirun's own)
  hang                  a rank is halted; the others give up waiting for it
  raise                 a rank's training raises
  flip, truncate        all ranks are killed, and a file of the newest checkpoint, or run.h5, is damaged
  disk                  no space is left
  unwritable            the disk is read-only, or a file is where the folder was
  nan, straggler, memory

Every round is told and on disk at once. Printed is for every kind: trials, rounds that had been told, those of them
that are not on disk, files that are damaged or cannot be read, runs that had not ended after a minute, the longest time
from a fault to the end, and in how many trials the whole run was the uninterrupted one in the end. The exit code is 1
if anything was lost, corrupt, hung, different or otherwise not as it should be. Small disks need root.

examples:
  python benchmarks/faults.py --trials 24
  python benchmarks/faults.py --trials 500 --minutes 60 --seed 1
  python benchmarks/faults.py --trials 5 --kinds kill,flip
"""

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import numpy as np

from hpcfed.record import checkpoints
from hpcfed.record.reading import read_run
from hpcfed.runtime.signals import STOPPED

WORK = [
    "run", "--model", "mlp", "--clients", "8", "--method", "fedper", "--participation", "0.75", "--precision", "fp32",
    "--deterministic", "--device", "cpu", "--epochs", "1", "--batch-size", "64", "--evaluate-every", "5",
    "--checkpoint-every", "3", "--stall-timeout", "8",
]  # fmt: skip
PATIENCE = 60.0
"""Seconds after which a run counts as hung."""
PAUSE = 0.4
"""Seconds from a life's first round, or the last fault that it bore, to the next fault; the mean."""
ENDING = ("kill", "killall", "term", "hang", "raise", "flip", "truncate", "disk", "unwritable")
BORNE = ("nan", "straggler", "memory")
KINDS = ENDING + BORNE
_TIMES = ("seconds", "imbalance", "rank")


@dataclass
class Tally:
    """Of one kind of fault."""

    trials: int = 0
    reported: int = 0
    lost: int = 0
    corrupt: int = 0
    hangs: int = 0
    slowest: float = 0.0
    compared: int = 0
    same: int = 0
    remarks: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.lost or self.corrupt or self.hangs or self.remarks) and self.same == self.compared

    def line(self, name: str) -> str:
        figures = f"{self.trials:7}{self.reported:10}{self.lost:6}{self.corrupt:9}{self.hangs:7}"
        return f"{name:11}{figures}{self.slowest:12.1f} s{self.same:6}"


HEADING = (
    f"{'fault':11}{'trials':>7}{'reported':>10}{'lost':>6}{'corrupt':>9}{'hangs':>7}{'slowest exit':>14}{'same':>6}"
)


class Job:
    """A run under mpirun, that commits what is ordered in a folder."""

    def __init__(self, orders: Path, words: list[str]) -> None:
        mpirun = Path(sys.executable).with_name("mpirun")
        launcher = str(mpirun) if mpirun.exists() else "mpirun"
        program = str(Path(__file__).with_name("faulty.py"))
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
        self._log = tempfile.NamedTemporaryFile()  # noqa: SIM115 (it lives as long as the job)
        self.process = subprocess.Popen(
            [launcher, "--oversubscribe", "-n", "2", sys.executable, program, str(orders), *words],
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            env=os.environ | root,
        )

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def ranks(self) -> list[int]:
        found = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True).stdout
        return [int(number) for number in found.split()]

    def begin(self) -> None:
        """Until it has told of a round."""
        self.until(lambda: self.reported() > 0, PATIENCE)

    def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Whether it has come true while the run was alive, or at its end."""
        end = time.monotonic() + seconds
        while self.alive and time.monotonic() < end:
            if condition():
                return True
            time.sleep(0.01)
        return condition()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
            return True
        self.end()
        return False

    def end(self) -> None:
        for number in [*self.ranks(), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        self.process.wait()

    def told(self) -> str:
        return Path(self._log.name).read_text(errors="replace")  # by a place of our own: the run writes at its own

    def reported(self) -> int:
        """The last round that the user has been told of."""
        return max((int(n) for n in re.findall(r"^round (\d+)/", self.told(), re.M)), default=0)


class Campaign:
    def __init__(self, kinds: list[str], *, trials: int, minutes: float, rounds: int, seed: int) -> None:
        self.tallies = {kind: Tally() for kind in kinds}
        self._trials, self._rounds, self._seed = trials, rounds, seed
        self._begin = time.monotonic()
        self._end = self._begin + 60 * minutes
        self._chance = random.Random(seed)
        self._pending: deque[str] = deque()
        self._chain: list[str] = []
        """The kinds of the faults that the present run has met."""
        self._handed_on = True
        """Whether a signal reaches the ranks as it is: to SIGTERM and SIGINT mpirun has an exit code of its own, and it
        kills ranks that have not ended after a second or so."""

    @property
    def done(self) -> int:
        return sum(tally.trials for tally in self.tallies.values())

    @property
    def enough(self) -> bool:
        return self.done >= self._trials or time.monotonic() > self._end

    def go(self, scratch: Path) -> None:
        for number in range(self._trials):
            if self.enough:
                return
            orders, disk = scratch / f"orders-{number}", scratch / f"disk-{number}"
            orders.mkdir()
            with small_disk(disk):
                self._chain = []
                if self._run(orders, disk):
                    self._compare(orders, disk)

    def _run(self, orders: Path, disk: Path) -> bool:
        """A run with as many lives as it takes; False if it cannot go on."""
        out, damaged = disk / "run", False
        words = [*WORK, "--rounds", str(self._rounds), "--out", str(out)]
        while True:
            withdraw(orders)
            job = Job(orders, words)
            try:
                job.begin()
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
            words = ["run", "--resume", str(out)]

    def _live(self, job: Job, orders: Path, out: Path) -> bool:
        """One life of a run: faults that it bears, and at most one that ends it; whether a file is damaged then."""
        while not self.enough:
            time.sleep(min(5 * PAUSE, self._chance.expovariate(1 / PAUSE)))
            if not job.alive:
                break
            kind = self._next()
            if kind in BORNE:
                self._bear(kind, job, orders, out)
                continue
            return self._strike(kind, job, orders, out)
        if not job.wait(2 * PATIENCE):
            self._remark("it does not end", job)
        elif job.process.returncode:
            self._remark(f"it has ended with {job.process.returncode}, though nothing was done to it", job)
        return False

    def _next(self) -> str:
        if not self._pending:
            kinds = list(self.tallies)
            self._chance.shuffle(kinds)
            self._pending.extend(kinds)
        return self._pending[0]

    def _count(self, kind: str, reported: int) -> Tally:
        """A trial that really was one."""
        self._pending.popleft()
        self._chain.append(kind)
        tally = self.tallies[kind]
        tally.trials += 1
        tally.reported += reported
        each = (time.monotonic() - self._begin) / self.done
        left = min(each * (self._trials - self.done), self._end - time.monotonic())
        line = f"trial {self.done} of {self._trials}: {kind} in round {reported}; {each:.1f} s each"
        print(f"{line}, {max(0.0, left) / 60:.1f} min left", file=sys.stderr, flush=True)
        return tally

    def _remark(self, text: str, job: Job | None = None, *, kind: str | None = None) -> None:
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
        """A fault that must not end the run, and must be seen in its record some rounds later."""
        before = job.reported()
        order = self._order(kind, orders)
        if not job.until(lambda: not order.exists(), PATIENCE):
            return
        job.until(lambda: job.reported() > before + 5, PATIENCE)
        self._count(kind, job.reported())
        if not job.alive and job.process.returncode:
            self._remark("the run has ended", job)
            return
        with h5py.File(out / "run.h5") as file:
            found = {
                "nan": lambda: np.nanmax(file["rounds/excluded"][before:]) == 1,
                "straggler": lambda: np.nanmax(file["rounds/imbalance"][before:]) > 1.5,
                "memory": lambda: np.nanmax(file["timing/halvings"][before:]) > 0 and "out of memory" in job.told(),
            }[kind]()
        if not found:
            self._remark("nothing of it is in the record", job)

    def _strike(self, kind: str, job: Job, orders: Path, out: Path) -> bool:
        """A fault that ends the run; whether a file is damaged in a way that the next life must notice."""
        begin, mend = time.monotonic(), self._inject(kind, job, orders, out)
        ended = job.wait(PATIENCE)
        seconds, code, reported = time.monotonic() - begin, job.process.returncode, job.reported()
        mend()
        if code == 0 or complete(out):  # it was so before the fault
            return False
        target = self._target(out) if kind in ("flip", "truncate") else None
        if kind in ("flip", "truncate") and target is None:  # nothing there yet that may be damaged
            return False
        tally = self._count(kind, reported)
        tally.hangs += not ended
        tally.slowest = max(tally.slowest, seconds)
        asked = kind == "term" and self._handed_on
        if (asked and code != STOPPED) or (kind != "term" and code == STOPPED):
            self._remark("not the exit code that it should be", job)
        try:
            record = read_run(out)
            tally.lost += max(0, reported - int(record.rounds_done))
            if asked and record.status != "stopped":
                self._remark(f"its status is {record.status}", job)
            bad: list[str] = []
            checkpoints.newest(out, say=bad.append)
            tally.corrupt += len(bad)
            for text in bad:
                self._remark(text, job)
        except Exception as error:
            tally.corrupt += 1
            self._remark(f"{type(error).__name__}: {error}", job)
        if target is None:
            return False
        self._damage(kind, target)
        return target.suffix == ".npy"

    def _inject(self, kind: str, job: Job, orders: Path, out: Path) -> Callable[[], None]:
        """Does it, and returns what undoes it once the run has ended."""
        chance, ranks = self._chance, job.ranks()
        with contextlib.suppress(ProcessLookupError, IndexError):
            match kind:
                case "kill":
                    os.kill(chance.choice(ranks), signal.SIGKILL)
                case "killall" | "flip" | "truncate":
                    for rank in ranks:
                        os.kill(rank, signal.SIGKILL)
                case "term":
                    number = chance.choice((signal.SIGTERM, signal.SIGINT, signal.SIGUSR2))
                    targets = chance.choice(([job.process.pid], ranks, [chance.choice(ranks)]))
                    self._handed_on = number == signal.SIGUSR2 or targets != [job.process.pid]
                    for target in targets:
                        os.kill(target, number)
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
        whole = sorted(path.parent for path in out.glob(f"checkpoints/*/{checkpoints.MARKER}"))
        files = [out / "run.h5"] if whole else []
        if len(whole) > 1 and (not files or self._chance.random() < 0.7):
            files = sorted(whole[-1].iterdir())
        return self._chance.choice(files) if files else None

    def _damage(self, kind: str, file: Path) -> None:
        content = bytearray(file.read_bytes())
        if kind == "truncate":
            content = content[: self._chance.randrange(len(content))]
        else:
            content[self._chance.randrange(len(content))] ^= 1 << self._chance.randrange(8)
        file.write_bytes(content)

    def _compare(self, orders: Path, disk: Path) -> None:
        """With a run that was not interrupted; what is found holds for all faults of the run."""
        withdraw(orders)
        (orders / "reference").touch()
        whole = disk / "whole"
        job = Job(orders, [*WORK, "--rounds", str(self._rounds), "--out", str(whole)])
        try:
            if not job.wait(2 * PATIENCE) or job.process.returncode:
                self._remark("the uninterrupted run does not work", job)
                return
            different = differences(whole, disk / "run")
        finally:
            job.end()
        if different:
            planted = (orders / "ledger").read_text().split("\n") if (orders / "ledger").exists() else []
            text = f"different from an uninterrupted run: {', '.join(different)}; faults {' '.join(self._chain)}"
            self._remark(f"{text}; planted {', '.join(planted)}")
        for kind in self._chain:
            self.tallies[kind].compared += 1
            self.tallies[kind].same += not different


def complete(out: Path) -> bool:
    with contextlib.suppress(Exception):
        return read_run(out).status == "complete"
    return False


def withdraw(orders: Path) -> None:
    """Orders that came too late for the run that they were meant for."""
    for order in orders.glob("order-*"):
        order.unlink()


def differences(one: Path, other: Path) -> list[str]:
    """What two runs have recorded differently, but for times, and which arrays of their last common checkpoints."""
    expected, found = numbers(one), numbers(other)
    names = []
    for name, values in expected.items():
        if not np.array_equal(values, found[name], equal_nan=True):
            unequal = (values != found[name]) & ~(np.isnan(values) & np.isnan(found[name]))
            names.append(f"{name} (first at {np.argwhere(unequal)[0].tolist()})")
    if read_run(other).status != "complete":
        names.append("status")
    states = [checkpoints.newest(run, say=names.append) for run in (one, other)]
    last = min(state.rounds if state else 0 for state in states)  # one that a signal has made may be later
    states = [checkpoints.newest(run, say=names.append, below=last + 1) for run in (one, other)]
    if not all(state and state.rounds == last for state in states):
        return [*names, "no checkpoints of the same round"]
    parts = [{(p.name, p.sha256) for p in state.parts if p.name != checkpoints.RECORD} for state in states if state]
    return names + sorted({name for name, _ in parts[0] ^ parts[1]})


def numbers(out: Path) -> dict[str, np.ndarray]:
    """All that a run has recorded, but for times."""
    with h5py.File(out / "run.h5") as file:
        return {
            f"{group}/{name}": data[()]
            for group in ("rounds", "clients")
            for name, data in file[group].items()
            if name not in _TIMES
        }


def fill(folder: Path) -> Callable[[], None]:
    """The disk is full from now on."""
    ballast = folder / "ballast"
    with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
        while file.write(bytes(2**12)):
            pass
    return lambda: ballast.unlink(missing_ok=True)


def read_only(out: Path, job: Job) -> Callable[[], None]:
    """The disk can be read only; that must wait for a moment in which no file is being written."""
    job.until(lambda: _mount("-o", "remount,ro", str(out.parent)), PATIENCE)

    def mend() -> None:
        _mount("-o", "remount,rw", str(out.parent))

    return mend


def replace(out: Path, job: Job) -> Callable[[], None]:
    """A file is where the folder was."""
    away = out.with_name("away")
    out.rename(away)
    out.touch()

    def mend() -> None:
        out.unlink()
        away.rename(out)

    return mend


def _mount(*words: str) -> bool:
    return not subprocess.run(["mount", *words], capture_output=True).returncode


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True)
    if not _mount("-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)):
        sys.exit("faults: disks that are full or read-only can be had by root only")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=24, help="in all; the kinds take turns (default: 24)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end after these, whatever is left")
    parser.add_argument("--rounds", type=int, default=200, help="of a run (default: 200)")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of " + ", ".join(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    kinds = asked.kinds.split(",")
    if strange := set(kinds) - set(KINDS):
        parser.error(f"unknown kind {sorted(strange)[0]}; there are {', '.join(KINDS)}")
    campaign = Campaign(kinds, trials=asked.trials, minutes=asked.minutes, rounds=asked.rounds, seed=asked.seed)
    interrupted = False
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the disk must not stay, nor the table be lost
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
