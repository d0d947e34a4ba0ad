"""What the launcher's environment variables say, before MPI starts.

A mistake on the command line must be reported before MPI or a device starts, and once,
not once per rank.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NoReturn

from hpcfed.errors import remark

ENDED = "HPCFED_ENDED"
"""The environment variable in which a script names a file. The root writes to it when
the command has ended successfully.
"""
_HYDRA = "MPI_LOCALNRANKS"
"""A variable of Hydra, the mpiexec of MPICH and Intel, which srun does not set."""
PATIENCE = 10
"""Seconds to wait for an answer of Slurm's controller."""


@dataclass(frozen=True)
class Launch:
    """Who started this process, and as which rank of how many."""

    launcher: str
    rank: int
    size: int

    @property
    def alone(self) -> bool:
        """Whether there is one process, with or without a launcher, and no MPI."""
        return self.size == 1


def launched(environment: Mapping[str, str] = os.environ) -> Launch:
    """Return what the launcher says; one rank without a launcher."""
    mpirun = _read(
        environment,
        "Open MPI's mpirun",
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
    )
    mpiexec = _read(environment, "mpiexec (PMI)", rank="PMI_RANK", size="PMI_SIZE")
    srun = _read(environment, "srun", rank="SLURM_PROCID", size="SLURM_STEP_NUM_TASKS")
    # A batch script that starts us without srun still sees the job's variables, but has
    # no step.
    if not environment.get("SLURM_STEP_ID", "").isdigit():
        srun = None
    # srun --mpi=pmi2 sets PMI's variables, too, and they agree with its own. But
    # mpiexec starts its daemons by srun, one per node, so its ranks also see a step.
    # With one rank per node those numbers agree as well. So what only mpiexec sets must
    # decide.
    agree = mpiexec and srun and mpiexec.rank == srun.rank and mpiexec.size == srun.size
    if agree and _HYDRA not in environment:
        mpiexec = None
    # mpirun inside a Slurm job also sees srun's variables: the innermost launcher
    # counts.
    return mpirun or mpiexec or srun or Launch("no launcher", 0, 1)


def _read(
    environment: Mapping[str, str], launcher: str, *, rank: str, size: str
) -> Launch | None:
    """Return what a launcher's two variables say; None if it has not set them."""
    ours, all_ranks = environment.get(rank, ""), environment.get(size, "")
    if ours.isdigit() and all_ranks.isdigit():
        return Launch(launcher, int(ours), int(all_ranks))
    return None


def is_copy(words: Sequence[str], environment: Mapping[str, str] = os.environ) -> bool:
    """Tell whether mpirun or srun has started this very command line several times, and
    this process is not the first of them.

    A script may have given each rank other words, as in `srun bash -c 'hpcfed show
    runs/$SLURM_PROCID'`.
    """
    launch = launched(environment)
    if launch.rank == 0:
        return False
    if launch.launcher == "srun":
        return _is_sruns_own(words, environment)
    # Other launchers do not say what they have started.
    ours = " ".join(words).split()
    started = environment.get("OMPI_ARGV", "").split()
    same = started[len(started) - len(ours) :] == ours
    # Several programs in one mpirun have words of their own.
    one_program = environment.get("OMPI_NUM_APP_CTX") == "1"
    return same and one_program


def _is_sruns_own(words: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Tell whether srun itself, not a script, has started this process with these words:
    then it has given them to all tasks.
    """
    typed = sys.orig_argv[: len(sys.orig_argv) - len(words)]
    if [*typed, *words] != sys.orig_argv:
        return False  # a program of the user's calls us
    # A script's last command may take over the script's process. But it takes no step's
    # name: that of the program, or of a file with words for each task.
    if environment.get("SLURM_TASK_PID") != str(os.getpid()):
        return False
    program = typed[0] if typed[-2:-1] == ["-m"] else typed[-1]
    step = f"{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}"
    ask = ["scontrol", "--oneliner", "show", "step", step]
    try:
        told = subprocess.run(ask, capture_output=True, text=True, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return f"Name={Path(program).name}" in told.stdout.split()


@contextmanager
def telling_a_good_end() -> Iterator[None]:
    """Make the root write to the file that ENDED names when the block ends
    successfully.

    srun may exit with 0 although it has launched no rank, so a script cannot rely on
    the exit code.
    """
    try:
        yield
    except SystemExit as ending:
        if not ending.code:
            _tell_a_good_end()
        raise
    _tell_a_good_end()


def _tell_a_good_end() -> None:
    file = os.environ.get(ENDED)
    if file and launched().rank == 0:
        with suppress(OSError):
            Path(file).write_text("ended well\n")


def leave(launch: Launch, code: int) -> NoReturn:
    """End this process, and with it all ranks, because of a mistake found before MPI
    started.

    The root just exits: usually every rank has the same mistake, and the launcher ends
    the others. If another rank is still alive, it has found a mistake that the root has
    not. It first meets the others in MPI, because a launcher that sees a rank vanish
    while others connect may wait forever (Open MPI 5.0, once in some hundred times).
    Under srun it must not: without --kill-on-bad-exit srun lets the others go on, and
    they would wait for a root that has gone.
    """
    if launch.rank and launch.launcher != "srun":
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError):
            sys.exit(code)
        MPI.COMM_WORLD.Abort(code)
    sys.exit(code)


# The command that starts a number of ranks: srun, mpirun, or none for a single rank.


Start = Callable[[int], list[str]]
"""Returns the command that starts this number of ranks."""
ALLOW_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
"""Variables that Open MPI's mpirun needs to run as root, as in a container."""


def launcher(name: str, environment: Mapping[str, str] = os.environ) -> Start:
    """Choose how ranks start: `auto` is srun in a Slurm job, else mpirun."""
    if name == "auto":
        name = "srun" if "SLURM_JOB_ID" in environment else "mpirun"
    return _srun(environment) if name == "srun" else _mpirun


def _srun(environment: Mapping[str, str]) -> Start:
    mpi = environment.get("MPI", "pmix")
    # A job step does not inherit the cores of the job's tasks.
    cores = environment.get("SLURM_CPUS_PER_TASK", "1")
    words = ["srun", f"--mpi={mpi}", "--kill-on-bad-exit=1", f"--cpus-per-task={cores}"]
    return lambda ranks: [*words, f"--ntasks={ranks}"]


def _mpirun(ranks: int) -> list[str]:
    if ranks == 1:
        return []
    return [mpirun_program(), *_binding(ranks), "-n", str(ranks)]


def mpirun_program() -> str:
    """Return the mpirun next to Python, which fits its library, or the path's."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else "mpirun"


def _binding(ranks: int) -> list[str]:
    """Give every rank the same number of cores for itself. If there are more ranks than
    cores, the system schedules them.
    """
    cores = _cores()
    # mpirun refuses more ranks than cores unless told otherwise.
    if ranks > cores:
        return ["--oversubscribe", "--bind-to", "none"]
    return ["--map-by", f"slot:PE={cores // ranks}", "--bind-to", "core"]


def _cores() -> int:
    """Count the cores that we may use; like mpirun, not hardware threads."""
    cores = {core_of(thread) for thread in os.sched_getaffinity(0)}
    return len(cores)


def core_of(thread: int) -> tuple[str, ...]:
    """Return the socket and the core of a hardware thread."""
    topology = Path(f"/sys/devices/system/cpu/cpu{thread}/topology")
    try:
        socket = (topology / "physical_package_id").read_text()
        return socket, (topology / "core_id").read_text()
    except OSError:  # some containers hide it: then count each thread as a core
        return (str(thread),)


def environment_of(words: Sequence[str]) -> dict[str, str]:
    """Return the environment for a command; if we are root, mpirun may run as root."""
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
