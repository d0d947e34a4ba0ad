"""Where one of the server's ranks computes."""

from dataclasses import dataclass

import torch

from hpcfed.runtime.world import World


@dataclass(frozen=True)
class RankSlot:
    """A rank's device, its number among the server's ranks, and how many they are."""

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
