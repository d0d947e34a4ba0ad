"""One step of a tiny network through DeepSpeed, on all ranks together."""

import warnings
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hpcfed.doctor.finding import Finding, error, fine
from hpcfed.runtime.world import World
from hpcfed.server.deepspeed_trainer import DeepSpeedTrainer
from hpcfed.server.options import ServerOptions
from hpcfed.server.sizes import Batching
from hpcfed.server.training_plan import RankSlot, TrainingPlan

ADVICE = (
    "install DeepSpeed anew (pip install deepspeed); methods without a server model do "
    "not need it, and --server-engine torch does without"
)
ROUNDING = 2.0**-23
"""Between 1 and the next number of float32."""


class Stepped(NamedTuple):
    """What a rank has got from one step."""

    version: str
    loss: float
    """The mean of all ranks' losses."""
    weight: float
    """The only weight, after the step."""


def look(world: World) -> Stepped:
    """Make a step; the same call on every rank, all of which must have a group.

    A rank's loss is its number, from 1, times the weight, which begins at 1.
    """
    network = nn.Linear(1, 1, bias=False)
    nn.init.ones_(network.weight)
    slot = RankSlot.of(world)
    plan = TrainingPlan(ServerOptions(), Batching(1, 1, slot.size), slot, steps=2)
    trainer = DeepSpeedTrainer(network, plan)
    sample = torch.full((1, 1), slot.rank + 1.0, device=slot.device)

    def loss(module: Callable[..., Tensor], step: int, micro: int) -> Tensor:
        return module(sample).sum()

    with warnings.catch_warnings():
        # torch's own thread of the backward pass says so of its first product.
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS")
        losses = trainer.fit(loss, 1, lambda *_: None)
    weight = float(network.weight.detach().float())
    trainer.close()
    return Stepped(metadata.version("deepspeed"), float(losses[0]), weight)


def judge(ranks: Mapping[int, Stepped]) -> list[Finding]:
    """Judge the step: the loss is known, and all ranks must have the same weight."""
    wanted = (len(ranks) + 1) / 2
    # Each rank's share is rounded, and each addition: by half of ROUNDING at most.
    slack = ROUNDING * len(ranks) * wanted
    wrong = [rank for rank, one in ranks.items() if not abs(one.loss - wanted) <= slack]
    if wrong:
        loss = ranks[wrong[0]].loss
        told = f"a step's loss is {loss:.9g} instead of {wanted:g}"
        return [error("DeepSpeed", told, ADVICE, *wrong)]
    weights = {one.weight for one in ranks.values()}
    # Every gradient is positive, so the weight must fall.
    if len(weights) > 1 or max(weights) >= 1:
        told = f"after a step ranks have weights {', '.join(map(str, sorted(weights)))}"
        return [error("DeepSpeed", told, ADVICE)]
    version = next(iter(ranks.values())).version
    return [fine("DeepSpeed", f"{version}, one step with right numbers")]
