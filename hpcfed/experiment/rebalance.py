"""Moving clients to other ranks between two rounds, when measured times say that it
pays.
"""

import time
from dataclasses import fields, replace
from typing import Any

import numpy as np

from hpcfed.clients.balance import Balance, Proposal
from hpcfed.clients.placement import LONGEST, client_loads
from hpcfed.experiment.assemble import Setup
from hpcfed.experiment.progress import RunProgress
from hpcfed.federation.cohort import Cohort
from hpcfed.record.results import ResultsWriter


class Moving:
    """Told of every round on every rank; the root judges, all ranks move."""

    def __init__(
        self, setup: Setup, results: ResultsWriter | None, progress: RunProgress
    ) -> None:
        config, clients = setup.settings.config, setup.clients
        loads = client_loads(
            clients.train_samples, epochs=config.epochs, batch_size=config.batch_size
        )
        made = results.moves if results is not None else 0
        self._setup = setup
        self._results = results
        self._progress = progress
        self._balance = Balance(
            loads,
            clients.rank,
            setup.world.num_workers,
            longest=LONGEST[setup.engine.mode],
            moving_seconds=setup.gather_seconds,
            moves=setup.collectives.bcast(made) if config.resume is not None else 0,
        )

    def after_round(
        self, state: Any, cohort: Cohort, train_seconds: np.ndarray | None
    ) -> Any:
        """The state for the next round; `train_seconds` of every rank are known on the
        root alone.
        """
        clients = (
            np.arange(len(self._setup.clients.rank))
            if self._setup.settings.options.all_train
            else cohort.clients
        )
        if self._setup.shards is None or not self._balance.note(clients, train_seconds):
            return state
        proposal: Proposal | None = None
        if train_seconds is None:
            self._balance.next_window()
        else:
            proposal = self._balance.propose(
                self._setup.settings.config.rounds - cohort.round - 1
            )
        proposal = self._setup.collectives.bcast(proposal)
        return state if proposal is None else self._move(state, cohort.round, proposal)

    def _move(self, state: Any, round: int, proposal: Proposal) -> Any:
        begin, old = time.perf_counter(), self._setup.clients.rank
        state = move(self._setup, state, proposal.rank)
        self._setup.collectives.barrier()
        seconds = time.perf_counter() - begin
        self._balance.moved(proposal.rank, seconds)
        if self._results is not None:
            self._results.write_move(round + 1, proposal.rank, seconds)
        self._progress.say(
            f"after round {round + 1}: {np.count_nonzero(old != proposal.rank)} of "
            f"{len(old)} clients moved in "
            f"{seconds:.2f} s; the slowest rank trained {proposal.before:.2f} times "
            f"the mean, now {proposal.after:.2f} "
            "expected"
        )
        return state


def move(setup: Setup, state: Any, rank: np.ndarray) -> Any:
    """Puts every client on its new rank, with its data and its rows of the state; the
    same call on every worker.
    """
    assert setup.shards is not None, "this run was assembled to stay as it is"
    before, after = setup.clients, replace(setup.clients, rank=rank)
    owned = {
        f.name: getattr(state, f.name) for f in fields(state) if f.metadata.get("owned")
    }
    rows = {
        name: setup.collectives.relocate(tensor, before.rank, rank)
        for name, tensor in owned.items()
    }
    setup.federation.settle(after, setup.shards)
    setup.clients = after
    return replace(state, **rows)
