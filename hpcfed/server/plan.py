"""What a trainer of one of the server's networks is told."""

from dataclasses import dataclass

from hpcfed.server.options import Batching, ServerOptions
from hpcfed.server.slot import RankSlot


@dataclass(frozen=True)
class TrainingPlan:
    """How a network is trained, on which rank, and for how long."""

    options: ServerOptions
    batching: Batching
    slot: RankSlot
    steps: int
    """The length of the learning rate's cosine."""
