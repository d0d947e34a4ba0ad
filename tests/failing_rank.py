"""Not a test: a run in which training fails on the last MPI rank. Arguments are those of hpcfed."""

import sys

from mpi4py import MPI

from hpcfed import cli
from hpcfed.clients import engine

if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
    original = engine.Engine._gradient

    def failing(self, rows, *arguments, **options):  # type: ignore[no-untyped-def]
        original(self, rows, *arguments, **options)
        raise FloatingPointError("planted failure")

    engine.Engine._gradient = failing  # type: ignore[method-assign]
cli.main(sys.argv[1:])
