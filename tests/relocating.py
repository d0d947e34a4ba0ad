"""Not a test: clients change ranks at random, with entries of several types and shapes
that name their client.
"""

import numpy as np
import torch

from hpcfed.runtime import world as worlds
from hpcfed.runtime.collectives import Collectives

CLIENTS = 17
world = worlds.enter(device="cpu")
collectives, rng = Collectives(world), np.random.default_rng(0)
numbers = torch.arange(CLIENTS)
entries = {
    "rows": torch.stack([1.0 / (numbers + 1), numbers * 3.7], 1),
    "doubles": (numbers.double() * torch.pi).view(-1, 1, 1).expand(-1, 2, 3),
    "scalars": numbers * 2**40,
    "flags": numbers % 3 == 0,
    "bfloats": numbers.bfloat16()[:, None],
    "nothing": torch.empty(CLIENTS, 0),
}
rank = rng.integers(world.size, size=CLIENTS)
for _ in range(4):
    after = rng.integers(world.size, size=CLIENTS)
    here = np.flatnonzero(rank == world.rank)
    sent = int(((rank == world.rank) & (after != world.rank)).sum())
    for name, whole in entries.items():
        before = collectives.bytes_sent
        moved = collectives.relocate(whole[here], rank, after)
        expected = whole[np.flatnonzero(after == world.rank)]
        assert moved.dtype == whole.dtype and torch.equal(moved, expected), (
            f"{name} on rank {world.rank}"
        )
        assert (
            collectives.bytes_sent - before
            == sent * whole[0].numel() * whole.element_size()
        ), "only movers are sent"
    rank = after
assert collectives.bcast(world.rank) == 0
print("all arrived")
world.close()
