"""The plan for training one of the server's networks: on which device, how, and for how
long.
"""

from dataclasses import dataclass

import torch

from hpcfed.runtime.world import World
from hpcfed.server.options import ServerOptions
from hpcfed.server.sizes import Batching


@dataclass(frozen=True)
class RankSlot:
    """A rank's device, its number among the server's ranks, and their number."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, world: World) -> "RankSlot":
        """Return the slot of this process within its role."""
        return cls(
            device=world.device,
            rank=world.role_rank,
            size=world.role_size,
        )


@dataclass(frozen=True)
class TrainingPlan:
    """How to train a network, on which rank, and for how long."""

    options: ServerOptions
    batching: Batching
    slot: RankSlot
    steps: int
    """The length of the learning rate's cosine."""
