"""What one sample costs, counted on the shapes that pass through the layers."""

import copy
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Cost:
    """Per sample."""

    forward: int
    """Multiply-adds of the forward pass, of convolutions and linear layers."""
    training: int
    """The same of a training step: forward, gradients of weights, and gradients of all inputs but the images."""
    activations: int
    """Floats that layers put out in the forward pass."""
    pooled: int
    """The same where an activation and a pooling are part of the layer before them."""


def cost(network: nn.Module, shape: tuple[int, int, int]) -> Cost:
    network = copy.deepcopy(network).eval()
    forward = training = activations = pooled = last = 0

    def seen(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal forward, training, activations, pooled, last
        activations += output.numel()
        if isinstance(module, nn.Conv2d | nn.Linear):
            kernel = prod(module.kernel_size) // module.groups if isinstance(module, nn.Conv2d) else 1
            once = output.numel() * kernel * inputs[0].shape[1]
            training += once * (2 if forward == 0 else 3)
            forward += once
        if isinstance(module, nn.ReLU | nn.LeakyReLU | nn.MaxPool2d):
            pooled += output.numel() - last
            last = output.numel()
        elif not isinstance(module, nn.Flatten | nn.Identity):
            pooled += output.numel()
            last = output.numel()

    leaves = [module for module in network.modules() if not list(module.children())]
    handles = [module.register_forward_hook(seen) for module in leaves]
    with torch.no_grad():
        network(torch.zeros(1, *shape))  # the device "meta" would take seconds to import what it needs
    for handle in handles:
        handle.remove()
    return Cost(forward, training, activations, pooled)
