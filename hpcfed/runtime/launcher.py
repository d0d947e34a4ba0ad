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

_VARIABLES = (  # launcher, rank, size
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpiexec (PMI)", "PMI_RANK", "PMI_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
_HYDRAS = "MPI_LOCALNRANKS"
"""A variable that mpiexec sets, MPICH's and Intel's, and srun does not."""
ENDED = "HPCFED_ENDED"
"""The environment variable in which a script names a file, to be told there of a good
end.
"""


@dataclass(frozen=True)
class Launch:
    launcher: str
    rank: int
    size: int

    @property
    def alone(self) -> bool:
        """No launcher, or one that started a single process: MPI is not needed."""
        return self.size == 1


def launched(environment: Mapping[str, str] = os.environ) -> Launch:
    """The launcher's word for our rank and the number of ranks; one rank when nothing
    launched us.
    """
    mpirun, mpiexec, srun = (_said(environment, *names) for names in _VARIABLES)
    # A batch script that starts us without srun still sees the job's variables, but no
    # step of its own.
    if not environment.get("SLURM_STEP_ID", "").isdigit():
        srun = None
    # srun --mpi=pmi2 sets PMI's variables, too. mpiexec starts its daemons by srun, one
    # per node, so ranks see a step then as well, and with one rank per node the numbers
    # agree: what only mpiexec sets must decide.
    if (
        mpiexec
        and srun
        and _HYDRAS not in environment
        and (mpiexec.rank, mpiexec.size) == (srun.rank, srun.size)
    ):
        mpiexec = None
    return mpirun or mpiexec or srun or Launch("no launcher", 0, 1)


def _said(
    environment: Mapping[str, str], launcher: str, rank: str, size: str
) -> Launch | None:
    """What a launcher's variables say, if they are there."""
    if environment.get(rank, "").isdigit() and environment.get(size, "").isdigit():
        return Launch(launcher, int(environment[rank]), int(environment[size]))
    return None


@contextmanager
def telling_a_good_end() -> Iterator[None]:
    """Within, a good end makes the root write to the file that ENDED names.

    srun may end with 0 although it has launched nobody, so a script cannot tell by its
    exit code.
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
    if file and not launched().rank:
        with suppress(OSError):
            Path(file).write_text("ended well\n")


def leave(launch: Launch, code: int) -> NoReturn:
    """Ends this process, and with it all ranks, over a mistake that was found before
    MPI started.

    The root just exits: a mistake that it finds is mostly every rank's, and the
    launcher ends the others. Another rank that is still alive has found what the root
    has not. It meets the others in MPI first, because a launcher that sees a rank
    vanish while others connect may wait for ever (Open MPI 5.0, once in some hundred
    times). Under srun it must not: unless told by --kill-on-bad-exit, srun lets the
    others go on, and they would wait for a root that has gone.
    """
    if launch.rank and launch.launcher != "srun":
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError):
            sys.exit(code)
        MPI.COMM_WORLD.Abort(code)
    sys.exit(code)
