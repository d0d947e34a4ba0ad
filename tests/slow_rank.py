"""Not a test: runs whose last MPI rank is slow.

Arguments are those of hpcfed, for one run after the other, parted by plus signs. With
SLOW=4 rounds are timed by a made-up clock, by which a load takes one second, and four on
the last rank: nothing depends on how busy the machine is. With SLEEP=2 the last rank
really sleeps for two seconds whenever it has trained. With ROWS=1 every client's row
after the last round of a run goes to OUT-rows-<rank>.npz.
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
from hpcfed.runtime import timer


class MadeUpClock:
    """A millisecond passes with every look, else only what is said to pass."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-3
        return self.now

    def process_time(self) -> float:
        return self.now


clock = MadeUpClock()
is_last = MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1
train, evaluate = engine.Engine.train, loop.evaluate


def slow_train(self, job):  # type: ignore[no-untyped-def]
    result = train(self, job)
    loads = client_loads(
        np.array(job.shard.sizes)[job.clients],
        epochs=job.recipe.epochs,
        batch_size=job.recipe.batch_size,
    )
    alone = np.zeros(len(loads), np.int64)
    work = rank_loads(loads, alone, 1, longest=LONGEST[self.mode])[0]
    clock.now += work * (float(os.environ.get("SLOW", "1")) if is_last else 1.0)
    time.sleep(float(os.environ.get("SLEEP", "0")) if is_last else 0.0)
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
if "SLOW" in os.environ:
    timer.time = clock  # type: ignore[assignment]
loop.evaluate = keeping_rows
for parting, words in groupby(sys.argv[1:], key="+".__eq__):
    if not parting:
        cli.main(list(words))
