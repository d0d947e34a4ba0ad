"""Which rank hosts which client."""

import heapq
from dataclasses import dataclass

import numpy as np


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


def place(loads: np.ndarray, ranks: int) -> np.ndarray:
    """The rank of every client: longest first onto the least loaded rank; every rank gets at least one.

    Ties go to the rank with fewer clients, then to the lower rank, so equal clients are dealt out evenly.
    """
    assert len(loads) >= ranks, "fewer clients than ranks"
    heap: list[tuple[float, int, int]] = [(0.0, 0, rank) for rank in range(ranks)]
    rank_of = np.empty(len(loads), np.int64)
    for client in np.argsort(-loads, kind="stable"):
        load, count, rank = heapq.heappop(heap)
        rank_of[client] = rank
        heapq.heappush(heap, (load + float(loads[client]), count + 1, rank))
    return rank_of
