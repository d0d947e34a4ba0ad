"""Who trains the server's networks: DeepSpeed, or a plain loop to compare with."""

import torch
from torch import nn

from hpcfed.server.deepspeed_trainer import DeepSpeedTrainer, import_deepspeed
from hpcfed.server.options import ServerOptions
from hpcfed.server.plan import TrainingPlan
from hpcfed.server.trainer import PlainTrainer, Trainer


def make_trainer(network: nn.Module, plan: TrainingPlan) -> Trainer:
    """Return a trainer of the engine that --server-engine names."""
    if plan.options.server_engine == "torch":
        return PlainTrainer(network, plan)
    return DeepSpeedTrainer(network, plan)


def import_engine(options: ServerOptions, device: torch.device) -> None:
    """Import what training will need: torch's first optimiser and DeepSpeed each take
    seconds.
    """
    # An optimiser of nothing: making the first one imports much of torch.
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    if options.server_engine == "deepspeed":
        import_deepspeed(device)
