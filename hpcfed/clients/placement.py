"""Which rank hosts which client."""

import heapq

import numpy as np


def place(loads: np.ndarray, ranks: int) -> list[np.ndarray]:
    """Client ids per rank, ascending: longest first onto the least loaded rank; every rank gets at least one.

    Ties go to the rank with fewer clients, then to the lower rank, so equal clients are dealt out evenly.
    """
    assert len(loads) >= ranks, "fewer clients than ranks"
    heap: list[tuple[float, int, int]] = [(0.0, 0, rank) for rank in range(ranks)]
    clients: list[list[int]] = [[] for _ in range(ranks)]
    for client in np.argsort(-loads, kind="stable"):
        load, count, rank = heapq.heappop(heap)
        clients[rank].append(int(client))
        heapq.heappush(heap, (load + float(loads[client]), count + 1, rank))
    return [np.sort(np.asarray(ids, np.int64)) for ids in clients]
