"""Not a test: workers and servers each sum their ranks in a torch.distributed world of
their own, and tell.

Arguments are numbers of server ranks; one such world after the other.
"""

import sys

import torch
import torch.distributed as dist

from hpcfed.runtime import world as worlds
from hpcfed.runtime.collectives import Collectives

for servers in map(int, sys.argv[1:]):
    world = worlds.enter(device="cpu", server_ranks=servers)
    total = Collectives(world).allreduce(torch.tensor([float(world.rank)]))
    joined = dist.get_world_size() if dist.is_initialized() else 0
    place = f"{world.role} {world.role_rank}/{world.role_size}"
    print(
        f"of {servers}: {place} sum {total.item():.0f} joined {joined} threads {world.threads}",
        flush=True,
    )
    world.barrier_all_roles()
    world.close()
