"""Not a test: workers and servers each sum their ranks in a torch.distributed world of their own, and tell."""

import sys

import torch
import torch.distributed as dist

from hpcfed.runtime import world as worlds
from hpcfed.runtime.collectives import Collectives

world = worlds.enter(device="cpu", server_ranks=int(sys.argv[1]))
total = Collectives(world).sum(torch.tensor([float(world.rank)]))
joined = dist.get_world_size() if dist.is_initialized() else 0
print(
    f"{world.role} {world.role_rank}/{world.role_size} sum {total.item():.0f} joined {joined} threads {world.threads}"
)
world.comm.Barrier()
world.close()
