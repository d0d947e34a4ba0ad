"""The choice of --server-engine: DeepSpeed, or a plain loop to compare with, trains the
server's networks and recomputes activations.
"""

import torch
from torch import Tensor, nn

from hpcfed.server.batch_norm import counted_once
from hpcfed.server.deepspeed_trainer import DeepSpeedTrainer, import_deepspeed
from hpcfed.server.networks import Checkpoint
from hpcfed.server.options import ServerOptions
from hpcfed.server.trainer import PlainTrainer, Trainer
from hpcfed.server.training_plan import TrainingPlan


def make_trainer(network: nn.Module, plan: TrainingPlan) -> Trainer:
    """Return the trainer that --server-engine names."""
    if plan.options.server_engine == "torch":
        return PlainTrainer(network, plan)
    return DeepSpeedTrainer(network, plan)


def import_engine(options: ServerOptions, device: torch.device) -> None:
    """Import what training needs in advance: torch's first optimiser and DeepSpeed take
    seconds each.
    """
    # A dummy optimiser: creating the first one imports much of torch.
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    if options.server_engine == "deepspeed":
        import_deepspeed(device)


def recomputing(options: ServerOptions) -> Checkpoint:
    """Return the engine's activation checkpointing: it calls a stage, drops its
    activations, and recomputes them in the backward pass.
    """
    if options.server_engine == "deepspeed":
        return _by_deepspeed
    return _by_torch


def _by_torch(module: nn.Module, *inputs: Tensor) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    output: Tensor = checkpoint(counted_once(module), *inputs, use_reentrant=False)
    return output


def _by_deepspeed(module: nn.Module, *inputs: Tensor) -> Tensor:
    import deepspeed  # the trainer has initialised it before

    if torch.is_grad_enabled() and not any(x.requires_grad for x in inputs):
        # DeepSpeed only calls backward if an input requires a gradient. Rows do not,
        # but the module's weights do.
        inputs = (inputs[0].detach().requires_grad_(), *inputs[1:])
    output: Tensor = deepspeed.checkpointing.checkpoint(counted_once(module), *inputs)
    return output
