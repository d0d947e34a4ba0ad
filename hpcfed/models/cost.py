"""What one sample costs, counted on the shapes that pass through the layers."""

import copy
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Cost:
    """Per sample."""

    training: int
    """Multiply-adds of a training step, of convolutions and linear layers: forward,
    gradients of weights, and gradients of all inputs but the images.
    """
    activations: int
    """Floats that layers put out in the forward pass."""


def cost(network: nn.Module, shape: tuple[int, int, int]) -> Cost:
    network = copy.deepcopy(network).eval()
    training = activations = 0

    def seen(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal training, activations
        activations += output.numel()
        if isinstance(module, nn.Conv2d | nn.Linear):
            kernel = (
                prod(module.kernel_size) // module.groups
                if isinstance(module, nn.Conv2d)
                else 1
            )
            first = training == 0
            training += (
                (2 if first else 3) * output.numel() * kernel * inputs[0].shape[1]
            )

    leaves = [module for module in network.modules() if not list(module.children())]
    handles = [module.register_forward_hook(seen) for module in leaves]
    with torch.no_grad():
        network(
            torch.zeros(1, *shape)
        )  # the device "meta" would take seconds to import what it needs
    for handle in handles:
        handle.remove()
    return Cost(training, activations)
