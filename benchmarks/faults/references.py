"""Undisturbed runs to compare with, and the words and stubs that all short runs share."""

import os
import random
import signal
import sys
import threading
from pathlib import Path

import h5py

from benchmarks.faults.lives import PATIENCE, WORK, Job, figures, on_ranks, program
from benchmarks.launching import ROOT
from hpcfed.results.checkpoints import MARKER
from hpcfed.results.folder import CHECKPOINTS
from hpcfed.results.study import read_gathered

ROUNDS = 15
PACE = 0.1
"""Seconds of a round while a fault is waited for."""
STUDY = """title = "two points"
[common]
model = "mlp"
method = "fedper"
precision = "fp32"
deterministic = true
device = "cpu"
rounds = 5
epochs = 1
ranks = 1
[sweep]
clients = [3, 4]
"""
SRUN = """#!/usr/bin/env bash
# Starts one process in place of Slurm's, with faults on order.
while [[ $1 == -* ]]; do shift; done
[[ $1 == env ]] && export "$2" && shift 2
python=$1
shift 3
exec "$python" "{faulty}" "{orders}" "$@"
"""
SCONTROL = """#!/usr/bin/env bash
echo "$@" >> "{folder}/requeued"
"""


class References:
    """Undisturbed runs, each made when it is first asked for."""

    def __init__(self, scratch: Path) -> None:
        self._scratch, self._lock = scratch, threading.Lock()

    def run(self, *words: str, ranks: int = 1) -> Path:
        """Return the folder of a run with these further options."""
        out = self._scratch / f"run-{ranks}{''.join(words)}"
        with self._lock:
            if not out.exists():
                command = program if ranks == 1 else on_ranks
                self._make(command(self._scratch, work(out, *words)))
        return out

    def study(self) -> Path:
        """Return the folder of a study."""
        out = self._scratch / "study"
        with self._lock:
            if not out.exists():
                (self._scratch / "study.toml").write_text(STUDY)
                self._make(study(self._scratch / "study.toml", out))
        return out

    def of_another_job(self) -> Path:
        """Return a run that a job has left unfinished, to go on with it later."""
        out = self._scratch / "another"
        with self._lock:
            if not out.exists():
                queue = Queue(self._scratch / "queue", job=41)
                pace(queue.orders, PACE)
                job = queue.start(0, work(out))
                job.until(lambda: job.reported() > 6, PATIENCE)
                os.kill(job.process.pid, signal.SIGUSR2)
                ended = job.wait(PATIENCE)
                if not ended or not list(out.glob(f"{CHECKPOINTS}/*/{MARKER}")):
                    raise RuntimeError(f"a run cannot be stopped:\n{job.told()}")
        return out

    def _make(self, command: list[str]) -> None:
        job = Job(command)
        if not job.wait(2 * PATIENCE) or job.process.returncode:
            raise RuntimeError(f"an undisturbed run does not work:\n{job.told()}")


class Queue:
    """What slurm/run.sbatch sees of Slurm: variables, and stubs of its commands."""

    def __init__(self, folder: Path, *, job: int) -> None:
        self.orders, self._bin, self._job = folder / "orders", folder / "bin", job
        self.requeued = folder / "requeued"
        self.orders.mkdir(parents=True)
        self._bin.mkdir()
        faulty = Path(__file__).with_name("faulty.py")
        for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
            (self._bin / name).write_text(
                text.format(faulty=faulty, orders=self.orders, folder=folder)
            )
            (self._bin / name).chmod(0o755)

    def start(self, restarts: int, words: list[str], folder: Path | None = None) -> Job:
        """Start the script as Slurm does after a number of restarts of the job."""
        variables = {
            "SLURM_JOB_ID": str(self._job),
            "SLURM_SUBMIT_DIR": str(ROOT),
            "PYTHON": sys.executable,
        }
        if restarts:
            variables["SLURM_RESTART_COUNT"] = str(restarts)
        # The stubs come first, before a real srun.
        variables["PATH"] = f"{self._bin}:{os.environ['PATH']}"
        return Job(
            ["bash", str(ROOT / "slurm/run.sbatch"), *words[1:]],
            folder=folder,
            **variables,
        )


def work(out: Path | None = None, *words: str) -> list[str]:
    """Return the words of a short run."""
    found = [*WORK, "--rounds", str(ROUNDS), *words]
    return found if out is None else [*found, "--out", str(out)]


def study(file: Path, out: Path) -> list[str]:
    """The command of a study."""
    return [sys.executable, "-m", "hpcfed", "study", str(file), "--out", str(out)]


def points(out: Path) -> list[tuple[str, str, int]]:
    """Return name, status and number of runs of every trial in a study's file."""
    found = []
    for trial in read_gathered(out / "study.h5").trials:
        found.append((trial.name, trial.outcome.status, len(trial.runs)))
    return found


def disturbed_run(whole: Path, out: Path) -> str | None:
    """Return the first run of a study whose figures are not those of an undisturbed
    one; None where all are the same.
    """
    with h5py.File(whole / "study.h5") as one, h5py.File(out / "study.h5") as other:
        for run in sorted(one["runs"]):
            expected = figures(one[f"runs/{run}/seed-0"])
            found = figures(other[f"runs/{run}/seed-0"])
            for name, values in expected.items():
                if values.tobytes() != found[name].tobytes():
                    return str(run)
    return None


def pace(orders: Path, seconds: float) -> None:
    """Make every round of a run take longer by these seconds, from now on."""
    temporary = orders / "unfinished-pace"
    temporary.write_text(str(seconds))
    # So that a rank reads all of it or nothing.
    temporary.rename(orders / "pace")


def damage(file: Path, chance: random.Random, *, cut: bool | None = None) -> None:
    """Truncate a file, or flip one of its bits."""
    content = bytearray(file.read_bytes())
    if chance.random() < 0.5 if cut is None else cut:
        content = content[: chance.randrange(len(content))]
    else:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


def alive(group: int) -> bool:
    """Return whether a process of this group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
