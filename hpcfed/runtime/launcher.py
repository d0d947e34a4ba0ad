"""What the launcher's environment variables say, before MPI starts.

A mistake on the command line must be reported before MPI or a device starts, and once,
not once per rank.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ENDED = "HPCFED_ENDED"
"""The environment variable in which a script names a file. The root writes to that file
when the command has ended well.
"""
_HYDRA = "MPI_LOCALNRANKS"
"""A variable that mpiexec sets, MPICH's and Intel's (both are Hydra), and srun does
not.
"""


@dataclass(frozen=True)
class Launch:
    """Who started this process, and as which rank of how many."""

    launcher: str
    rank: int
    size: int

    @property
    def alone(self) -> bool:
        """Whether no launcher, or one, started a single process: MPI is not needed."""
        return self.size == 1


def launched(environment: Mapping[str, str] = os.environ) -> Launch:
    """Return what the launcher says; one rank when nothing launched us."""
    mpirun = _read(
        environment,
        "Open MPI's mpirun",
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
    )
    mpiexec = _read(environment, "mpiexec (PMI)", rank="PMI_RANK", size="PMI_SIZE")
    srun = _read(environment, "srun", rank="SLURM_PROCID", size="SLURM_STEP_NUM_TASKS")
    # A batch script that starts us without srun still sees the job's variables, but no
    # step of its own.
    if not environment.get("SLURM_STEP_ID", "").isdigit():
        srun = None
    # srun --mpi=pmi2 sets PMI's variables, too, and they agree with its own. But mpiexec
    # starts its daemons by srun, one per node, so its ranks also see a step; with one
    # rank per node those numbers agree as well. What only mpiexec sets must decide.
    agree = mpiexec and srun and mpiexec.rank == srun.rank and mpiexec.size == srun.size
    if agree and _HYDRA not in environment:
        mpiexec = None
    return mpirun or mpiexec or srun or Launch("no launcher", 0, 1)


def _read(
    environment: Mapping[str, str], launcher: str, *, rank: str, size: str
) -> Launch | None:
    """Return what a launcher's two variables say; None where it has not set them."""
    ours, all_ranks = environment.get(rank, ""), environment.get(size, "")
    if ours.isdigit() and all_ranks.isdigit():
        return Launch(launcher, int(ours), int(all_ranks))
    return None


@contextmanager
def telling_a_good_end() -> Iterator[None]:
    """Make the root write to the file that ENDED names when the block ends well.

    srun may exit with 0 although it has launched nobody, so a script cannot rely on
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
    """End this process, and with it all ranks, over a mistake that was found before MPI
    started.

    The root just exits: its mistake is mostly every rank's, and the launcher ends the
    others. Another rank that is still alive has found what the root has not. It meets
    the others in MPI first, because a launcher that sees a rank vanish while others
    connect may wait for ever (Open MPI 5.0, once in some hundred times). Under srun it
    must not: without --kill-on-bad-exit srun lets the others go on, and they would wait
    for a root that has gone.
    """
    if launch.rank and launch.launcher != "srun":
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError):
            sys.exit(code)
        MPI.COMM_WORLD.Abort(code)
    sys.exit(code)
