"""Not a test: a run in which training fails on the last MPI rank. Arguments are those
of hpcfed.
"""

import sys

from mpi4py import MPI

from hpcfed import cli
from hpcfed.clients import training

if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
    original = training.StackTraining._descend

    def failing(self, *arguments):  # type: ignore[no-untyped-def]
        original(self, *arguments)
        raise FloatingPointError("planted failure")

    training.StackTraining._descend = failing  # type: ignore[method-assign]
cli.main(sys.argv[1:])
