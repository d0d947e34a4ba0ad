"""Not a test: workers and servers each sum their ranks in a torch.distributed world of
their own, and tell. One rank of each role makes an array for all.

Arguments are numbers of server ranks; one such world after the other.
"""

import sys

import numpy as np
import torch
import torch.distributed as dist

from hpcfed.runtime import process_group
from hpcfed.runtime import world as worlds
from hpcfed.runtime.collectives import Collectives
from hpcfed.runtime.sharing import once_per_host


def make() -> dict[str, np.ndarray]:
    print(f"made for {world.role}s of {servers}", flush=True)
    return {"all": np.arange(5) + servers}


for servers in map(int, sys.argv[1:]):
    world = worlds.enter(device="cpu", server_ranks=servers)
    total = Collectives(world).allreduce(torch.tensor([float(world.rank)]))
    joined = dist.get_world_size() if dist.is_initialized() else 0
    # By columns in one rank, by rows in the other.
    table = torch.arange(6.0).view(2, 3)
    summed = table.T if world.role_rank % 2 else table.T.contiguous()
    process_group.allreduce(summed)
    assert torch.equal(summed, world.role_size * torch.arange(6.0).view(2, 3).T)
    arrays = once_per_host(world, make)
    assert arrays["all"].tolist() == [servers + i for i in range(5)]
    place = f"{world.role} {world.role_rank}/{world.role_size}"
    print(
        f"of {servers}: {place} sum {total.item():.0f} joined {joined} threads {world.threads}",
        flush=True,
    )
    world.barrier_all_roles()
    world.close()
