"""Not a test: a run in which a server rank fails as it is to learn, or with FAIL=worker
the last worker in round 2.

Arguments are those of hpcfed.
"""

import os
import sys
from typing import NoReturn

from hpcfed import cli
from hpcfed.methods import pfedgpa
from hpcfed.runtime.launcher import launched
from hpcfed.server import rank
from hpcfed.server.requests import Learn

handle, round = rank.ServerRank.handle, pfedgpa.round


def fail() -> NoReturn:
    raise FloatingPointError("planted failure")


def failing_handle(self, requests):  # type: ignore[no-untyped-def]
    if isinstance(requests[0], Learn):
        fail()
    return handle(self, requests)


def failing_round(fed, state, cohort):  # type: ignore[no-untyped-def]
    if cohort.round == 1:
        fail()
    return round(fed, state, cohort)


if os.environ.get("FAIL") == "worker":
    if launched().rank == launched().size - 2:
        pfedgpa.round = failing_round
else:
    rank.ServerRank.handle = failing_handle  # type: ignore[method-assign]
cli.main(sys.argv[1:])
