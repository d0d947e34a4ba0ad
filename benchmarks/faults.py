"""A campaign of faults against real runs under mpirun: what is lost, what is corrupt, who hangs.

Every trial starts a run, injects one fault at a random moment, waits for its end, looks at what is on disk, resumes the
run until it is complete, and compares its numbers to those of a run that nothing happened to, bit for bit. Printed is
one line for every kind of fault:

  trials, rounds that had been reported when the fault came, rounds that were reported and are not on disk, files that
  cannot be read, runs that had not ended after a minute, the longest time from the fault to the end, and how many
  resumed runs were the same as the uninterrupted one.

The exit code is 1 if anything was lost, corrupt, hung or different.

examples:
  python benchmarks/faults.py --trials 3
  python benchmarks/faults.py --trials 70 --kinds kill,term,hang,raise,flip,truncate,disk --seed 1
"""

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import numpy as np

from hpcfed.record.checkpoints import MARKER
from hpcfed.record.reading import read_run

ROUNDS = 60
WORK = (
    "run --model mlp --clients 6 --method fedper --participation 0.5 --precision fp32 --deterministic --device cpu "
    f"--rounds {ROUNDS} --checkpoint-every 7 --stall-timeout 10"
).split()
PATIENCE = 60.0
"""Seconds after which a run counts as hung."""
KINDS = ("kill", "term", "hang", "raise", "flip", "truncate", "disk")
_TIMES = ("seconds", "imbalance", "rank")
_RAISING = """
import sys
from mpi4py import MPI
from hpcfed import cli
from hpcfed.clients.engine import Engine
train, left = Engine.train, [int(sys.argv.pop(1))]
def failing(self, *words, **more):
    left[0] -= 1
    if left[0] == 0 and MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
        raise FloatingPointError("planted")
    return train(self, *words, **more)
Engine.train = failing
cli.main(sys.argv[1:])
"""


@dataclass
class Tally:
    """Of one kind of fault."""

    trials: int = 0
    reported: int = 0
    lost: int = 0
    corrupt: int = 0
    hangs: int = 0
    slowest: float = 0.0
    same: int = 0
    remarks: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.lost or self.corrupt or self.hangs) and self.same == self.trials


class Job:
    """A run under mpirun."""

    def __init__(self, words: list[str], *, program: list[str] | None = None) -> None:
        mpirun = Path(sys.executable).with_name("mpirun")
        launcher = str(mpirun) if mpirun.exists() else "mpirun"
        program = program or ["-m", "hpcfed"]
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it lives as long as the job)
        self.process = subprocess.Popen(
            [launcher, "--oversubscribe", "-n", "2", sys.executable, *program, *words],
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            env=os.environ | root,
        )

    def ranks(self) -> list[int]:
        found = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True).stdout
        return [int(number) for number in found.split()]

    def wait(self, seconds: float) -> bool:
        """Whether it has ended by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
            return True
        for number in [*self.ranks(), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        self.process.wait()
        return False

    def told(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def reported(self) -> int:
        """The last round that the user has been told of."""
        return max((int(n) for n in re.findall(rf"round (\d+)/{ROUNDS}", self.told())), default=0)


def trial(kind: str, folder: Path, expected: dict[str, np.ndarray], chance: random.Random, tally: Tally) -> None:
    tally.trials += 1
    out = folder / "run"
    with _disk(folder, small=kind == "disk"):
        program = ["-c", _RAISING, str(chance.randrange(2, 20))] if kind == "raise" else None
        job = Job([*WORK, "--out", str(out)], program=program)
        _await_first_round(job, out)
        time.sleep(chance.random())
        begin = time.monotonic()
        _inject(kind, job, out, chance)
        ended = job.wait(PATIENCE)
        tally.hangs += not ended
        tally.slowest = max(tally.slowest, time.monotonic() - begin)
        reported = job.reported()
        tally.reported += reported
        if kind in ("flip", "truncate"):
            _damage(kind, out, chance)
        if kind == "disk":
            (folder / "ballast").unlink(missing_ok=True)
        try:
            record = read_run(out)
            tally.lost += max(0, reported - int(record.rounds_done))
            if record.status != "complete":
                _resume(out, tally)
            tally.same += _same(expected, numbers(out), tally)
        except Exception as error:
            tally.corrupt += 1
            tally.remarks.append(f"{kind}: {type(error).__name__}: {error}")


def _await_first_round(job: Job, out: Path) -> None:
    waited = time.monotonic() + PATIENCE
    while not (out / "run.h5").exists() and job.process.poll() is None and time.monotonic() < waited:
        time.sleep(0.02)


def _inject(kind: str, job: Job, out: Path, chance: random.Random) -> None:
    ranks = job.ranks()
    with contextlib.suppress(ProcessLookupError, IndexError):
        match kind:
            case "kill":
                os.kill(chance.choice(ranks), signal.SIGKILL)
            case "term":
                job.process.send_signal(signal.SIGTERM)
            case "hang":
                os.kill(chance.choice(ranks), signal.SIGSTOP)
            case "flip" | "truncate":
                for rank in ranks:
                    os.kill(rank, signal.SIGKILL)
            case "disk":
                _fill(out.parent)


def _fill(folder: Path) -> None:
    """The disk is full from now on."""
    with contextlib.suppress(OSError), open(folder / "ballast", "wb", buffering=0) as file:
        while file.write(bytes(2**16)):
            pass


@contextlib.contextmanager
def _disk(folder: Path, *, small: bool) -> Iterator[None]:
    folder.mkdir(parents=True)
    if small:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        if small:
            subprocess.run(["umount", str(folder)], check=True)


def _damage(kind: str, out: Path, chance: random.Random) -> None:
    """Of a file of the newest checkpoint."""
    markers = sorted(out.glob(f"checkpoints/*/{MARKER}"))
    if not markers:
        return
    file = chance.choice(sorted(markers[-1].parent.iterdir()))
    content = bytearray(file.read_bytes())
    if kind == "truncate":
        content = content[: chance.randrange(len(content))]
    else:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


def _resume(out: Path, tally: Tally) -> None:
    job = Job(["run", "--resume", str(out)])
    if not job.wait(2 * PATIENCE):
        tally.hangs += 1
    elif job.process.returncode:
        tally.remarks.append(job.told()[-400:])


def numbers(out: Path) -> dict[str, np.ndarray]:
    """All that a run has recorded, but for times."""
    with h5py.File(out / "run.h5") as file:
        return {
            f"{group}/{name}": data[()]
            for group in ("rounds", "clients")
            for name, data in file[group].items()
            if name not in _TIMES
        }


def _same(expected: dict[str, np.ndarray], found: dict[str, np.ndarray], tally: Tally) -> bool:
    different = [name for name, values in expected.items() if not np.array_equal(values, found[name], equal_nan=True)]
    if different:
        tally.remarks.append(f"different: {', '.join(different)}")
    return not different


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=3, help="of every kind")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of " + ", ".join(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    kinds = asked.kinds.split(",")
    if strange := set(kinds) - set(KINDS):
        parser.error(f"unknown kind {sorted(strange)[0]}; there are {', '.join(KINDS)}")
    chance = random.Random(asked.seed)
    tallies = {kind: Tally() for kind in kinds}
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "whole"
        job = Job([*WORK, "--out", str(whole)])
        if not job.wait(PATIENCE) or job.process.returncode:
            sys.exit(f"the run does not even work without faults:\n{job.told()}")
        expected = numbers(whole)
        for number in range(asked.trials):
            for kind in kinds:
                folder = Path(scratch) / f"{kind}-{number}"
                trial(kind, folder, expected, chance, tallies[kind])
                shutil.rmtree(folder, ignore_errors=True)
            print(f"{number + 1} of {asked.trials} trials of every kind", file=sys.stderr, flush=True)
    print(
        f"{'fault':10}{'trials':>7}{'reported':>10}{'lost':>6}{'corrupt':>9}{'hangs':>7}{'slowest exit':>14}{'same':>6}"
    )
    for kind, t in tallies.items():
        figures = f"{t.trials:7}{t.reported:10}{t.lost:6}{t.corrupt:9}{t.hangs:7}{t.slowest:12.1f} s{t.same:6}"
        print(f"{kind:10}{figures}")
    for kind, t in tallies.items():
        for remark in dict.fromkeys(t.remarks):
            print(f"{kind}: {remark}")
    sys.exit(0 if all(t.clean for t in tallies.values()) else 1)


if __name__ == "__main__":
    main()
