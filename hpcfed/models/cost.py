"""What one sample costs in a network: multiply-adds and activations.

Clients' and server's networks are counted by the same formula, `multiply_adds`.
"""

import copy
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

Weighted = nn.Conv1d | nn.Conv2d | nn.ConvTranspose1d | nn.Linear
"""Layers whose products make nearly all of a network's arithmetic."""


def multiply_adds(layer: Weighted, positions: int = 1) -> int:
    """Return the multiply-adds of one sample's forward pass through a layer.

    `positions` are those at which a kernel is applied: outputs of a convolution, inputs
    of a transposed one.
    """
    # Not `weight.numel()`: ZeRO 3 leaves an empty weight where parameters are split.
    if isinstance(layer, nn.Linear):
        return positions * layer.in_features * layer.out_features
    channels = layer.in_channels * layer.out_channels // layer.groups
    return positions * channels * prod(layer.kernel_size)


@dataclass(frozen=True)
class Cost:
    """What one sample costs."""

    training: int
    """Multiply-adds of a training step in convolutions and linear layers: forward,
    gradients of weights, and gradients of all inputs but the images.
    """
    activations: int
    """Floats that layers put out in the forward pass."""


def cost(network: nn.Module, shape: tuple[int, int, int]) -> Cost:
    """Count on the shapes that an image of this shape takes through the network."""
    # A copy, whose hooks and mode leave no trace; eval, so batch norm takes one sample.
    network = copy.deepcopy(network).eval()
    training = activations = 0

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal training, activations
        activations += output.numel()
        if isinstance(module, nn.Conv2d | nn.Linear):
            # Nobody needs the gradient of the images, which enter the first layer.
            passes = 3 if training else 2
            positions = output[0, 0].numel()
            training += passes * multiply_adds(module, positions)

    for module in network.modules():
        # Containers put out what their last layer did: counted once.
        is_leaf = next(module.children(), None) is None
        if is_leaf:
            module.register_forward_hook(count)
    with torch.no_grad():
        # Not on the device "meta", which takes seconds to import what it needs.
        network(torch.zeros(1, *shape))
    return Cost(training, activations)
