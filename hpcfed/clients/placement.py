"""Which rank hosts which client: by steps at first, by measured time later."""

import heapq
from dataclasses import dataclass

import numpy as np

from hpcfed.clients.schedule import Length, num_steps

PRESENCE = 0.25
"""Steps that every client counts for: clients without data are spread, too."""
LONGEST = {"batched": 2.0, "vmap": 2.0, "loop": 0.0}
"""How many extra times a rank's longest client counts, by engine: a stack takes as many
steps as its longest client.

Measured on a CPU with 100 Dirichlet(0.1) clients: the time of a stack followed the
steps of all clients plus 1.9 times (cnn-digits), 9 times (mlp) and 0.02 times
(cnn-cifar) those of the longest. Samples instead of steps fitted worse in five of six
cases, because short batches are padded.
"""


@dataclass(frozen=True)
class Clients:
    """All clients of the federation, by id."""

    rank: np.ndarray
    """The worker rank that hosts a client."""
    train_samples: np.ndarray
    test_samples: np.ndarray

    def on(self, rank: int) -> np.ndarray:
        """Return the ids of a rank's clients, ascending."""
        return np.flatnonzero(self.rank == rank)


def client_loads(
    train_samples: np.ndarray, *, epochs: int, batch_size: int
) -> np.ndarray:
    """Return the work of each client in a round, in steps."""
    return num_steps(train_samples, Length(epochs, batch_size)) + PRESENCE


def rank_loads(
    loads: np.ndarray, rank: np.ndarray, ranks: int, *, longest: float = 0.0
) -> np.ndarray:
    """Return the work of each rank: its clients, plus `longest` × its longest."""
    # Unbuffered: `most[rank] = max(…)` would see only the last client of a rank.
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
    """Return the rank of every client; every rank gets at least one.

    Clients are assigned, longest first, to the rank that finishes them earliest.
    `speeds` are the ranks' loads per second, equal by default; `longest` is as in
    `rank_loads`. Ties go to the rank with fewer clients, then to the lower rank, so
    equal clients are spread evenly.
    """
    assert len(loads) >= ranks, "fewer clients than ranks"
    if ranks == 1:
        # Shortcut: placing a million clients on the only rank would take 16 seconds.
        return np.zeros(len(loads), np.int64)
    if speeds is None:
        return _place_on_equals(loads, ranks, longest)
    # Speeds differ only after a measurement, which is rare: this loop may be slower
    # than the heap below.
    seconds_per_load = 1 / speeds
    totals = np.zeros(ranks)
    counts = np.zeros(ranks, np.int64)
    empty = ranks
    # A rank's first client is its longest, because the longest are placed first.
    weight = np.full(ranks, 1 + longest)
    rank_of = np.empty(len(loads), np.int64)
    for placed, client in enumerate(np.argsort(-loads, kind="stable")):
        after = totals + loads[client] * weight
        ends = after * seconds_per_load
        # Keep the last clients for ranks so slow that none was assigned to them.
        if len(loads) - placed == empty:
            ends[counts > 0] = np.inf
        # Not by sorting the ranks, which takes nearly twice as long with 512 of them.
        earliest = np.flatnonzero(ends == ends.min())
        rank = earliest[counts[earliest].argmin()]
        rank_of[client] = rank
        totals[rank] = after[rank]
        empty -= int(counts[rank] == 0)
        counts[rank] += 1
        weight[rank] = 1
    return rank_of


def _place_on_equals(loads: np.ndarray, ranks: int, longest: float) -> np.ndarray:
    """Place clients on ranks of one speed, by the same rules, with a heap.

    Comparing all ranks for every client took 1.6 s for 100,000 clients on 128 ranks,
    and every rank does this when a run starts.
    """
    rank_of = np.empty(len(loads), np.int64)
    # Ranks with clients, sorted by work, then by number of clients, then by rank. Empty
    # ranks are all alike: the lowest is next.
    busy: list[tuple[float, int, int]] = []
    empty = 0
    order = np.argsort(-loads, kind="stable")
    descending = loads[order].tolist()
    for placed, (client, load) in enumerate(zip(order, descending, strict=True)):
        left, bare = len(loads) - placed, ranks - empty
        first = load * (1 + longest)
        # On a tie the empty rank wins, because it has fewer clients.
        takes_empty = bare and (not busy or first <= busy[0][0] + load)
        if takes_empty or left == bare:
            rank_of[client] = empty
            heapq.heappush(busy, (first, 1, empty))
            empty += 1
            continue
        total, clients, rank = busy[0]
        rank_of[client] = rank
        heapq.heapreplace(busy, (total + load, clients + 1, rank))
    return rank_of
