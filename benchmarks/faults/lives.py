"""Real runs that a campaign of faults starts, watches, ends and compares."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path

import h5py
import numpy as np

from benchmarks import launching
from hpcfed.results import checkpoints
from hpcfed.results.stored import read_run

WORK = [
    "run", "--model", "mlp", "--clients", "8", "--method", "fedper", "--participation", "0.75", "--precision", "fp32",
    "--deterministic", "--device", "cpu", "--epochs", "1", "--batch-size", "64", "--evaluate-every", "5",
    "--checkpoint-every", "3", "--stall-timeout", "8",
]  # fmt: skip
STALL = 8.0
"""The --stall-timeout of that work."""
PATIENCE = 60.0
"""Seconds after which a run counts as hung."""
_TIMES = ("seconds", "cpu_seconds", "imbalance", "rank")


@dataclass
class Tally:
    """What was found in trials of one kind of fault."""

    trials: int = 0
    reported: int = 0
    """Rounds that users had been told of."""
    lost: int = 0
    corrupt: int = 0
    hangs: int = 0
    touched: int = 0
    """Files outside the run's folder, or users' own in it, that are not as they were.
    """
    slowest: float = 0.0
    compared: int = 0
    same: int = 0
    remarks: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        bad = self.lost or self.corrupt or self.hangs or self.touched or self.remarks
        return not bad and self.same == self.compared

    def add(self, other: "Tally") -> None:
        """Take in what other trials have found."""
        for name in (one.name for one in fields(self)):
            both = getattr(self, name), getattr(other, name)
            # Everything adds up but the longest time.
            setattr(self, name, max(both) if name == "slowest" else both[0] + both[1])

    def line(self, name: str) -> str:
        """Return a line of the campaign's table."""
        counts = f"{self.trials:7}{self.reported:10}{self.lost:6}{self.corrupt:9}{self.hangs:7}{self.touched:9}"
        return f"{name:13}{counts}{self.slowest:12.1f} s{self.same:6}"


HEADING = (
    f"{'fault':13}{'trials':>7}{'reported':>10}{'lost':>6}{'corrupt':>9}{'hangs':>7}{'touched':>9}"
    f"{'slowest exit':>14}{'same':>6}"
)


class Job:
    """A process, and those that it starts."""

    def __init__(
        self, command: list[str], *, folder: Path | None = None, **variables: str
    ) -> None:
        self._log = tempfile.NamedTemporaryFile()  # noqa: SIM115 (it lives as long as the job)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            cwd=folder,
            env=launching.environment() | {"OMP_NUM_THREADS": "1"} | variables,
            # A session of its own, so that end() reaches all that it starts.
            start_new_session=True,
        )

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def ranks(self) -> list[int]:
        """Return the processes that mpirun has started."""
        found = subprocess.run(
            ["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True
        ).stdout
        return [int(number) for number in found.split()]

    def begin(self) -> None:
        """Wait until the run has reported a round."""
        self.until(lambda: self.reported() > 0, PATIENCE)

    def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Return whether the condition has come true while the run was alive, or at its
        end.
        """
        end = time.monotonic() + seconds
        while self.alive and time.monotonic() < end:
            if condition():
                return True
            time.sleep(0.01)
        return condition()

    def wait(self, seconds: float) -> bool:
        """Return whether the run has ended by itself; end it otherwise."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
            return True
        self.end()
        return False

    def end(self) -> None:
        """Kill the run with all that it has started."""
        for number in [*self.ranks(), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        # Whatever has lived on without its parent is still in the session.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def told(self) -> str:
        """Return what the run has written to its standard error so far."""
        # Opened anew, because the run writes at the position of the file object.
        return Path(self._log.name).read_text(errors="replace")

    def reported(self) -> int:
        """Return the last round that the run has reported to the user."""
        rounds = re.findall(r"^round (\d+)/", self.told(), re.M)
        return max(map(int, rounds), default=0)

    def refusal(self) -> str | None:
        """Return the one line with which the run was refused; None if it went on, or
        said more than that.

        Another rank says the same where mpirun is slow to end it.
        """
        lines = [line.strip() for line in self.told().splitlines()]
        said = set()
        for line in lines:
            if line.startswith("hpcfed: "):
                said.add(re.sub("^hpcfed: (rank [0-9]+: )?", "", line))
        plain = len(said) == 1 and "Traceback" not in self.told()
        return said.pop() if self.process.poll() == 2 and plain else None


def program(orders: Path, words: list[str]) -> list[str]:
    """Return the command of a single process that commits what is ordered in a folder."""
    return [sys.executable, *_faulty(orders, words)]


def on_ranks(orders: Path, words: list[str]) -> list[str]:
    """Return the command of two ranks that commit what is ordered in a folder."""
    return launching.on_ranks(2, _faulty(orders, words))


def _faulty(orders: Path, words: list[str]) -> list[str]:
    return [str(Path(__file__).with_name("faulty.py")), str(orders), *words]


def complete(out: Path) -> bool:
    """Return whether the run in this folder is complete."""
    with contextlib.suppress(Exception):
        return read_run(out).status == "complete"
    return False


def count_losses(tally: Tally, job: Job, out: Path, *, stopped: bool) -> list[str]:
    """Count what is lost or corrupt in the folder of a run that has ended, and return
    remarks; `stopped` says that the run should have stopped by itself.
    """
    remarks: list[str] = []
    try:
        record = read_run(out)
        tally.lost += max(0, job.reported() - int(record.rounds_done))
        bad: list[str] = []
        checkpoints.newest(out, say=bad.append)
    except Exception as error:
        tally.corrupt += 1
        return [f"{type(error).__name__}: {error}"]
    tally.corrupt += len(bad)
    if stopped and record.status != "stopped":
        remarks.append(f"its status is {record.status}")
    return remarks + bad


def differences(one: Path, other: Path) -> list[str]:
    """Return what two runs have recorded differently, times apart, and which arrays of
    their last common checkpoints differ.
    """
    expected, found = numbers(one), numbers(other)
    names = []
    for name, values in expected.items():
        # NaN stands for a round that was not evaluated, and equals itself here.
        if not np.array_equal(values, found[name], equal_nan=True):
            both_nan = np.isnan(values) & np.isnan(found[name])
            unequal = (values != found[name]) & ~both_nan
            names.append(f"{name} (first at {np.argwhere(unequal)[0].tolist()})")
    if read_run(other).status != "complete":
        names.append("status")
    states = [checkpoints.newest(run, say=names.append) for run in (one, other)]
    # The last in common: a checkpoint that a signal has made may be later.
    last = min(state.rounds if state else 0 for state in states)
    states = [
        checkpoints.newest(run, say=names.append, below=last + 1)
        for run in (one, other)
    ]
    if not all(state and state.rounds == last for state in states):
        return [*names, "no checkpoints of the same round"]
    parts = [
        {(p.name, p.sha256) for p in state.files if p.name != checkpoints.RECORD}
        for state in states
        if state
    ]
    return names + sorted({name for name, _ in parts[0] ^ parts[1]})


def numbers(out: Path) -> dict[str, np.ndarray]:
    """Return all that a run has recorded, times apart."""
    with h5py.File(out / "run.h5") as file:
        return figures(file)


def figures(file: h5py.Group) -> dict[str, np.ndarray]:
    """Return the figures of a run's open file, or of a run in a study's."""
    found = {}
    for group in ("rounds", "clients"):
        for name, data in file[group].items():
            if name not in _TIMES:
                found[f"{group}/{name}"] = data[()]
    return found
