"""What one sample costs in a network: multiply-adds and activations.

Clients' and server's networks are counted by the same formula, `multiply_adds`.
"""

import copy
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from hpcfed.models.own import Sample

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


def cost(network: nn.Module, sample: Sample) -> Cost:
    """Count on the shapes that a sample takes through the network."""
    # A copy, whose hooks and mode leave no trace; eval, so batch norm takes one sample.
    network = copy.deepcopy(network).eval()
    training = activations = 0

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: object) -> None:
        nonlocal training, activations
        # Recurrent layers put out their states as well.
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, Tensor):
            return
        activations += first.numel()
        if isinstance(module, nn.Conv2d | nn.Conv1d | nn.Linear):
            # Nobody needs the gradient of the images, which enter the first layer.
            passes = 3 if training else 2
            channels = first.shape[-1 if isinstance(module, nn.Linear) else 1]
            training += passes * multiply_adds(module, first.numel() // channels)

    for module in network.modules():
        # Containers put out what their last layer did: counted once.
        is_leaf = next(module.children(), None) is None
        if is_leaf:
            module.register_forward_hook(count)
    with torch.no_grad():
        # Not on the device "meta", which takes seconds to import what it needs.
        network(sample.batch(1, device=torch.device("cpu"), dtype=torch.float32))
    return Cost(training, max(1, activations))


def saved_floats(network: nn.Module, sample: Sample) -> int:
    """Return the floats of one sample that a training pass keeps for its gradients.

    A network of the user's may compute much outside of layers, which `cost` overlooks.
    """
    network = copy.deepcopy(network).train()
    parameters = {p.data_ptr() for p in network.parameters()}
    saved = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal saved
        if tensor.data_ptr() not in parameters:
            saved += tensor.numel()
        return tensor

    # Two samples, because batch norm refuses one.
    x = sample.batch(2, device=torch.device("cpu"), dtype=torch.float32)
    keeping = torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept)
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), keeping:
        network(x)
    return saved // 2
