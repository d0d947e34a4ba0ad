"""Relocates clients between two rounds, if measured times show that it pays."""

import time
from dataclasses import fields, replace
from typing import Any

import numpy as np

from hpcfed.clients.balance import Balance, Proposal
from hpcfed.clients.placement import LONGEST, client_loads
from hpcfed.experiment.assemble import Setup
from hpcfed.experiment.progress import RunProgress
from hpcfed.federation.cohort import Cohort
from hpcfed.results.results import ResultsWriter


class Rebalancer:
    """Takes note of every round on every rank; the root decides, all ranks relocate."""

    def __init__(
        self, setup: Setup, results: ResultsWriter | None, progress: RunProgress
    ) -> None:
        config = setup.settings.config
        clients = setup.clients
        loads = client_loads(
            clients.train_samples, epochs=config.epochs, batch_size=config.batch_size
        )
        before = 0
        if config.resume is not None:
            # Only the root has read how often clients were relocated before.
            known = 0 if results is None else results.relocations
            before = setup.collectives.bcast(known)
        self._setup = setup
        self._results = results
        self._progress = progress
        self._balance = Balance(
            loads,
            clients.rank,
            setup.world.num_workers,
            longest=LONGEST[setup.engine.mode],
            relocation_seconds=setup.gather_seconds,
            relocations=before,
        )

    def after_round(
        self, state: Any, cohort: Cohort, train_seconds: np.ndarray | None
    ) -> Any:
        """Return the state for the next round; only the root knows `train_seconds`."""
        setup = self._setup
        if setup.shards is None:
            return state
        # Only clients that trained explain a rank's seconds.
        trained = cohort.clients
        if setup.settings.options.asynchronous and cohort.log.arrived is not None:
            trained = cohort.log.arrived
        if not self._balance.note(trained, train_seconds):
            return state
        proposal: Proposal | None = None
        if train_seconds is None:
            # Keeps this rank's window in step with the root's.
            self._balance.next_window()
        else:
            rounds_left = setup.settings.config.rounds - cohort.round - 1
            proposal = self._balance.propose(rounds_left)
        # All ranks reach this in the same rounds: windows count rounds, not
        # measurements.
        proposal = setup.collectives.bcast(proposal)
        if proposal is None:
            return state
        return self._relocate(state, cohort.round, proposal)

    def _relocate(self, state: Any, round: int, proposal: Proposal) -> Any:
        setup = self._setup
        before = setup.clients.rank
        begin = time.perf_counter()
        state = relocate(setup, state, proposal.rank)
        # A relocation costs as much as its slowest rank takes.
        setup.collectives.barrier()
        seconds = time.perf_counter() - begin
        self._balance.relocated(proposal.rank, seconds)
        if self._results is not None:
            self._results.write_relocation(round + 1, proposal.rank, seconds)
        moved = np.count_nonzero(before != proposal.rank)
        self._progress.say(
            f"after round {round + 1}: {moved} of {len(before)} clients moved in "
            f"{seconds:.2f} s; the slowest rank trained {proposal.before:.2f} times "
            f"the mean, now {proposal.after:.2f} expected"
        )
        return state


def relocate(setup: Setup, state: Any, rank: np.ndarray) -> Any:
    """Move clients to new ranks, with data and rows; the same call on every worker."""
    assert setup.shards is not None, "this run was assembled to stay as it is"
    late = setup.federation.server_side.late
    if late is not None:
        # The server generates rows for clients of this rank as they were.
        late.settle()
    before = setup.clients
    after = replace(before, rank=rank)
    rows = {}
    for field in fields(state):
        # Shared fields are already on every rank.
        if field.metadata.get("owned"):
            tensor = getattr(state, field.name)
            relocated = setup.collectives.relocate(tensor, before.rank, rank)
            rows[field.name] = relocated
    memory = setup.federation.channel.memory
    # Ranks must exchange rows in the same order.
    for name in sorted(memory.rows):
        tensor = memory.rows[name]
        memory.rows[name] = setup.collectives.relocate(tensor, before.rank, rank)
    memory.num_clients = int(np.count_nonzero(rank == setup.world.role_rank))
    # Samples are not sent: every rank loads the data of its new clients.
    setup.federation.relocate(after, setup.shards)
    setup.clients = after
    return replace(state, **rows)
