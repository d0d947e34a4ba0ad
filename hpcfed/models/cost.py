"""What one sample costs in a network: multiply-adds and activations.

Networks of clients and of the server are counted by the same formula, `multiply_adds`.
"""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from hpcfed.models.blocks import Blocks, find_blocks, is_large, shortened
from hpcfed.models.frozen import (
    META,
    callable_copy,
    described_copy,
    place_of,
    without_values,
)
from hpcfed.models.own import Sample, answers
from hpcfed.models.plain import SingleValues

Weighted = nn.Conv1d | nn.Conv2d | nn.ConvTranspose1d | nn.Linear
"""Layers that do nearly all of a network's arithmetic."""


def multiply_adds(layer: Weighted, positions: int = 1) -> int:
    """Return the multiply-adds of one sample's forward pass through a layer.

    `positions` is how often a kernel is applied: once per output of a convolution, once
    per input of a transposed one.
    """
    # Not `weight.numel()`: ZeRO 3 leaves an empty weight if parameters are split.
    if isinstance(layer, nn.Linear):
        return positions * layer.in_features * layer.out_features
    channels = layer.in_channels * layer.out_channels // layer.groups
    return positions * channels * prod(layer.kernel_size)


@dataclass(frozen=True)
class LayerCost:
    """What one sample costs in one call of a module that has parameters."""

    forward: int
    """Multiply-adds of a forward pass; 0 but for convolutions and linear layers."""
    weight: str
    """Name of the weight that these multiply with; empty if it is frozen."""
    parameters: frozenset[str]
    """Names of all its own parameters that are not frozen."""
    inputs: tuple[int, ...] = ()
    """Shape of what enters it, for one sample; empty but for convolutions and linear
    layers.
    """


@dataclass(frozen=True)
class Cost:
    """What one sample costs."""

    training: int
    """Multiply-adds of a training step in convolutions and linear layers: forward,
    gradients of trained weights, and gradients of inputs that lead to trained weights.
    """
    activations: int
    """Floats that layers output in the forward pass."""
    layers: tuple[LayerCost, ...] = ()
    """Layers in the order in which a sample passes them."""
    outputs: int = 0
    """Floats of the network's answer, such as the logits of all tokens."""

    def training_of(self, trained: Collection[str]) -> int:
        """Return the multiply-adds of a step that trains only these parameters."""
        return _training(self.layers, frozenset(trained))


def _training(layers: Collection[LayerCost], trained: Collection[str]) -> int:
    total = 0
    # The gradient of an input is needed if anything before it is trained. The gradient
    # of the images, which enter the first layer, is never needed.
    leads = False
    for layer in layers:
        total += (1 + (layer.weight in trained) + leads) * layer.forward
        leads = leads or not layer.parameters.isdisjoint(trained)
    return total


def cost(network: nn.Module, sample: Sample) -> Cost:
    """Count with the shapes that a sample takes through the network."""
    x = sample.batch(1, device=torch.device("cpu"), dtype=torch.float32)
    if is_large(network) and find_blocks(network) is not None:
        # A network may need values.
        with suppress(Exception):
            described, there = described_copy(network), x.to(META)
            with without_values():
                return _counted(described, there)
    # A copy, so that hooks and mode leave no trace.
    return _counted(callable_copy(network), x.to(place_of(network)[0]))


def _counted(network: nn.Module, x: Tensor) -> Cost:
    # So batch norm takes one sample. Without running statistics it does so within
    # `SingleValues` alone.
    network.eval()
    activations = 0
    layers: list[LayerCost] = []
    # Tied weights have one name, just as they have one place in a row.
    names = {p: name for name, p in network.named_parameters() if p.requires_grad}

    def add(module: nn.Module, forward: int, shape: tuple[int, ...] = ()) -> None:
        own = {key: names[p] for key, p in module._parameters.items() if p in names}
        if forward or own:
            weight = own.get("weight", "")
            layers.append(LayerCost(forward, weight, frozenset(own.values()), shape))

    def enter(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        add(module, 0)

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: object) -> None:
        nonlocal activations
        # Recurrent layers also output their states.
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, Tensor):
            return
        activations += first.numel()
        forward = 0
        shape: tuple[int, ...] = ()
        if isinstance(module, nn.Conv2d | nn.Conv1d | nn.Linear):
            shape = tuple(inputs[0].shape[1:])
            channels = first.shape[-1 if isinstance(module, nn.Linear) else 1]
            forward = multiply_adds(module, first.numel() // channels)
        add(module, forward, shape)

    for module in network.modules():
        # Containers output what their last layer did, which is counted already. Their
        # own parameters, such as positions, may be used as soon as they are entered.
        is_leaf = next(module.children(), None) is None
        if is_leaf:
            module.register_forward_hook(count)
        elif module._parameters:
            module.register_forward_pre_hook(enter)
    with torch.no_grad(), SingleValues():
        outputs = answers(network(x)).numel()
    training = _training(layers, frozenset(names.values()))
    return Cost(training, max(1, activations), tuple(layers), outputs)


@dataclass(frozen=True)
class Kept:
    """The floats of one sample that a training pass keeps for its gradients."""

    total: int
    blocks: int = 0
    """How many equal blocks there are; 0: unknown."""
    of_block: int = 0
    passed: int = 0
    """What a block passes on."""

    @property
    def recomputed(self) -> int:
        """What is kept if blocks compute their activations again, one at a time."""
        if not self.blocks:
            return self.total
        most = self.blocks - 1
        return self.total - most * self.of_block + self.blocks * self.passed


def kept_floats(network: nn.Module, sample: Sample) -> Kept:
    """Count what a training pass keeps of one sample.

    A user's network may compute a lot outside of layers, which `cost` overlooks.
    """
    blocks = find_blocks(network) if is_large(network) else None
    if blocks is not None and blocks.alike:
        # The network may need all its blocks.
        with suppress(Exception):
            short = [shortened(network, blocks, each, share=True) for each in (1, 2)]
            one, two = (_saved(each, sample) for each in short)
            # The first block keeps less: no gradient leads to before it.
            of_block = two - one
            number = len(blocks.kinds)
            total = two + (number - 2) * of_block
            return Kept(total, number, of_block, _passed(short[0], blocks, sample))
    return Kept(_saved(network, sample))


def _passed(network: nn.Module, blocks: Blocks, sample: Sample) -> int:
    """Return the floats of one sample that a block passes on."""
    device, dtype = place_of(network)
    network, found = callable_copy(network), 0

    def count(module: nn.Module, inputs: object, output: object) -> None:
        nonlocal found
        first = output[0] if isinstance(output, tuple) else output
        found = first.numel() if isinstance(first, Tensor) else 0

    blocks.of(network)[0].register_forward_hook(count)
    with torch.no_grad():
        network.eval()(sample.batch(1, device=device, dtype=dtype))
    return found


def _saved(network: nn.Module, sample: Sample) -> int:
    device, dtype = place_of(network)
    network = callable_copy(network).train()
    parameters = {p.data_ptr() for p in network.parameters()}
    saved = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal saved
        if tensor.data_ptr() not in parameters:
            saved += tensor.numel()
        return tensor

    # Weights are saved for the backward pass, too, but once for all samples: `keep`
    # skips them.
    # Two samples, because batch norm refuses one.
    x = sample.batch(2, device=device, dtype=dtype)
    keeping = torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept)
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), keeping:
        network(x)
    return saved // 2
