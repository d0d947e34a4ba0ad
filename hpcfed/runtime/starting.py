"""The words that start a number of ranks: srun, mpirun, or none for a single rank."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from hpcfed.errors import remark

Start = Callable[[int], list[str]]
"""Returns the words that start so many ranks."""
ALLOW_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
"""Variables without which Open MPI's mpirun refuses to run as root, as one is in a
container.
"""


def launcher(name: str, environment: Mapping[str, str] = os.environ) -> Start:
    """Choose how ranks are started: `auto` takes srun in a Slurm job, and mpirun
    elsewhere.
    """
    if name == "auto":
        name = "srun" if "SLURM_JOB_ID" in environment else "mpirun"
    return _srun(environment) if name == "srun" else _mpirun


def _srun(environment: Mapping[str, str]) -> Start:
    mpi = environment.get("MPI", "pmix")
    # A job step does not inherit the cores of the job's tasks.
    cores = environment.get("SLURM_CPUS_PER_TASK", "1")
    words = [
        "srun",
        f"--mpi={mpi}",
        "--kill-on-bad-exit=1",
        f"--cpus-per-task={cores}",
    ]
    return lambda ranks: [*words, f"--ntasks={ranks}"]


def _mpirun(ranks: int) -> list[str]:
    if ranks == 1:
        return []
    return [mpirun_program(), *_binding(ranks), "-n", str(ranks)]


def mpirun_program() -> str:
    """Return the mpirun beside Python, which fits the library that Python loads, or
    else the first on the path.
    """
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else "mpirun"


def _binding(ranks: int) -> list[str]:
    """Give every rank an equal number of cores to itself. More ranks than cores share
    them as the system likes.
    """
    cores = _cores()
    # mpirun refuses more ranks than cores unless it is told.
    if ranks > cores:
        return ["--oversubscribe", "--bind-to", "none"]
    return ["--map-by", f"slot:PE={cores // ranks}", "--bind-to", "core"]


def _cores() -> int:
    """Count the cores that we may use; two hardware threads of a core count once, as
    they do for mpirun.
    """
    cores = {_core(thread) for thread in os.sched_getaffinity(0)}
    return len(cores)


def _core(thread: int) -> tuple[str, ...]:
    """Return the socket and the core of a hardware thread."""
    topology = Path(f"/sys/devices/system/cpu/cpu{thread}/topology")
    try:
        socket = (topology / "physical_package_id").read_text()
        return socket, (topology / "core_id").read_text()
    except OSError:  # some containers hide it: then each thread is a core
        return (str(thread),)


def environment_of(words: Sequence[str]) -> dict[str, str]:
    """Return the environment for a command; mpirun is told to run as root where we do."""
    variables = dict(os.environ)
    missing = [name for name in ALLOW_ROOT if name not in variables]
    if os.geteuid() == 0 and missing and words[0] == mpirun_program():
        _remark_root()
        variables |= dict.fromkeys(missing, "1")
    return variables


@cache  # once, not for every trial
def _remark_root() -> None:
    names = " and ".join(ALLOW_ROOT)
    remark(f"hpcfed: we are root, which mpirun refuses; {names} are set for it")
