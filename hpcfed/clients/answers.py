"""The classes that rows assign to single samples of clients."""

import numpy as np
import torch
from torch import Tensor

from hpcfed.clients.job import RowEngine
from hpcfed.clients.objective import CLASSES
from hpcfed.data.shards import Shard


def agreement(
    engine: RowEngine,
    rows: Tensor,
    others: Tensor,
    shard: Shard,
    clients: np.ndarray,
    *,
    classes: int,
) -> Tensor:
    """Return the share of each client's samples on which `rows[i]` and `others[i]` give
    the same answer; NaN for clients without samples.
    """
    shares = torch.full((len(rows),), torch.nan, device=rows.device)
    for number, client in enumerate(clients.tolist()):
        if not shard.sizes[client]:
            continue
        one = answers(engine, rows[number], shard, client, classes=classes)
        other = answers(engine, others[number], shard, client, classes=classes)
        shares[number] = (one == other).float().mean()
    return shares


def answers(
    engine: RowEngine, row: Tensor, shard: Shard, client: int, *, classes: int
) -> Tensor:
    """Return the class that a row assigns to each sample of a client.

    The engine sums over a client's samples. Here every sample is its own client, so
    that a sum is one answer.
    """
    size = shard.sizes[client]
    alone = Shard(
        inputs=shard.inputs,
        targets=shard.targets,
        index=shard.index[client, :size].unsqueeze(1),
        sizes=(1,) * size,
        clients=np.full(size, shard.clients[client]),
        task=shard.task,
    )
    # Expanded, so that the engine judges one row on many clients, in full batches.
    score = engine.evaluate(
        row.expand(size, -1), alone, np.arange(size), {CLASSES: (3, classes)}
    )
    # CLASSES holds found, taken for, and belongs to; take the second.
    taken_for = score.sums[CLASSES][:, 1]
    return taken_for.argmax(1)
