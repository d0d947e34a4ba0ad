"""What --server-engine decides: who trains the server's networks, DeepSpeed or a plain
loop to compare with, and who computes activations anew.
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


def recomputing(options: ServerOptions) -> Checkpoint:
    """Return how the engine calls a stage that forgets its activations, and computes
    them anew in the backward pass.
    """
    if options.server_engine == "deepspeed":
        return _by_deepspeed
    return _by_torch


def _by_torch(module: nn.Module, *inputs: Tensor) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    output: Tensor = checkpoint(counted_once(module), *inputs, use_reentrant=False)
    return output


def _by_deepspeed(module: nn.Module, *inputs: Tensor) -> Tensor:
    import deepspeed  # the trainer has started it by then

    if torch.is_grad_enabled() and not any(x.requires_grad for x in inputs):
        # DeepSpeed calls backward only for inputs that want a gradient. Rows want none,
        # but the module's weights do.
        inputs = (inputs[0].detach().requires_grad_(), *inputs[1:])
    output: Tensor = deepspeed.checkpointing.checkpoint(counted_once(module), *inputs)
    return output
