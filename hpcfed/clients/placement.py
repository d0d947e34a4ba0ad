"""Which rank hosts which client: by steps at first, by measured time later."""

from dataclasses import dataclass

import numpy as np

from hpcfed.clients.schedule import Length, num_steps

PRESENCE = 0.25
"""Steps that a client counts for merely being there; it also deals clients without data
out evenly.
"""
LONGEST = {"batched": 2.0, "loop": 0.0}
"""How much more a rank's longest client counts, by engine: a stack takes as many steps
as its longest client.

Measured on a CPU with 100 Dirichlet(0.1) clients, the time of a stack followed all
clients' steps plus 1.9 times (cnn-digits), 9 times (mlp) and 0.02 times (cnn-cifar) the
longest client's. Samples in place of steps fitted worse in five of six cases, because
short batches are padded.
"""


@dataclass(frozen=True)
class Clients:
    """All clients of the federation, by id."""

    rank: np.ndarray
    """The worker rank that hosts a client."""
    train_samples: np.ndarray
    test_samples: np.ndarray

    def on(self, rank: int) -> np.ndarray:
        """Ids of a rank's clients, ascending."""
        return np.flatnonzero(self.rank == rank)


def client_loads(
    train_samples: np.ndarray, *, epochs: int, batch_size: int
) -> np.ndarray:
    """The work of each client in a round, in steps."""
    return num_steps(train_samples, Length(epochs, batch_size)) + PRESENCE


def rank_loads(
    loads: np.ndarray, rank: np.ndarray, ranks: int, *, longest: float = 0.0
) -> np.ndarray:
    """The work of each rank: of all its clients, and so many times its longest client's
    on top.
    """
    most = np.zeros(ranks)
    np.maximum.at(most, rank, loads)
    return np.bincount(rank, loads, ranks) + longest * most


def place(
    loads: np.ndarray,
    ranks: int,
    *,
    speeds: np.ndarray | None = None,
    longest: float = 0.0,
) -> np.ndarray:
    """The rank of every client: longest first onto the rank that finishes it earliest;
    every rank gets at least one.

    `speeds` are loads per second of the ranks, equal unless given; `longest` is as for
    `rank_loads`. Ties go to the rank with fewer clients, then to the lower rank, so
    equal clients are dealt out evenly.
    """
    assert len(loads) >= ranks, "fewer clients than ranks"
    seconds_per_load = np.ones(ranks) if speeds is None else 1 / speeds
    totals, counts = np.zeros(ranks), np.zeros(ranks, np.int64)
    rank_of = np.empty(len(loads), np.int64)
    for placed, client in enumerate(np.argsort(-loads, kind="stable")):
        after = totals + loads[client] * np.where(
            counts == 0, 1 + longest, 1
        )  # a rank's first is its longest
        order = np.lexsort((counts, after * seconds_per_load))
        if len(loads) - placed == np.count_nonzero(
            counts == 0
        ):  # the last ones, for ranks so slow that none came
            order = order[counts[order] == 0]
        rank = order[0]
        rank_of[client] = rank
        totals[rank] = after[rank]
        counts[rank] += 1
    return rank_of
