"""Activation checkpointing: stages forget their activations, and compute them anew in
the backward pass.
"""

import torch
from torch import Tensor, nn

from hpcfed.server.batch_norm import counted_once
from hpcfed.server.networks import Checkpoint
from hpcfed.server.options import ServerOptions


def recomputing(options: ServerOptions) -> Checkpoint:
    """Return the engine's way to call a stage that forgets its activations."""
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
