"""Not a test: runs whose last MPI rank trains SLOW times as long as its work takes.

Arguments are those of hpcfed, for one run after the other, parted by plus signs. With
STEADY=1 every rank's training is drawn out to 1.5 ms per load, so that little depends
on how busy the machine is. With ROWS=1 every client's row after the last round of a run
goes to OUT-rows-<rank>.npz.
"""

import os
import sys
import time
from itertools import groupby
from pathlib import Path

import numpy as np
from mpi4py import MPI

from hpcfed import cli
from hpcfed.clients import engine
from hpcfed.clients.placement import LONGEST, client_loads, rank_loads
from hpcfed.experiment import loop

SECONDS_PER_LOAD = 1.5e-3
slow = (
    float(os.environ.get("SLOW", "1"))
    if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1
    else 1.0
)
train, evaluate = engine.Engine.train, loop.evaluate


def slow_train(self, job):  # type: ignore[no-untyped-def]
    begin = time.perf_counter()
    result = train(self, job)
    wanted = slow * (time.perf_counter() - begin)
    if os.environ.get("STEADY"):
        loads = client_loads(
            np.array(job.shard.sizes)[job.clients],
            epochs=job.recipe.epochs,
            batch_size=job.recipe.batch_size,
        )
        nobody = np.zeros(len(loads), np.int64)
        work = rank_loads(loads, nobody, 1, longest=LONGEST[self.mode])[0]
        wanted = slow * SECONDS_PER_LOAD * work
    time.sleep(max(0.0, begin + wanted - time.perf_counter()))
    return result


def keeping_rows(setup, state, *judged):  # type: ignore[no-untyped-def]
    fed = setup.federation
    if "ROWS" in os.environ and fed.round == fed.config.rounds - 1:
        rows = setup.method.personal(fed, state, np.arange(len(fed.clients)))
        np.savez(
            Path(f"{fed.config.out}-rows-{setup.world.rank}.npz"),
            clients=fed.clients,
            rows=rows.cpu().numpy(),
        )
    return evaluate(setup, state, *judged)


engine.Engine.train = slow_train  # type: ignore[method-assign]
loop.evaluate = keeping_rows
for parting, words in groupby(sys.argv[1:], key="+".__eq__):
    if not parting:
        cli.main(list(words))
