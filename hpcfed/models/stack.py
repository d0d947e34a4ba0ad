"""A network stacked over clients: one forward pass for many clients, each with its own
weights.

Clients are folded into the batch dimension, client by client: activations are [clients
· slots, …]. Everything that treats samples alike (activations, pooling, flatten,
residual sums) is then right as it stands. Only layers with weights, batch norm and
dropout must know whose sample is whose; `stacked_layers` has those. So any torch module
made of such layers can be stacked. A stack of one client runs torch's own kernels, so a
large network pays nothing for being stackable.
"""

import copy
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hpcfed.kernels import linear
from hpcfed.models.stacked_layers import (
    STACKED_LAYERS,
    Batch,
    StackedBatchNorm2d,
    StackedConv2d,
    StackedDropout,
    StackedLinear,
)


class StackedNetwork:
    """A network whose layers with weights or random numbers are replaced by stacked
    ones.
    """

    def __init__(self, network: nn.Module, *, bf16: bool = False) -> None:
        self._bf16 = bf16
        self._batch = Batch()
        self._network = _stacked(
            copy.deepcopy(network), self._batch, "", itertools.count()
        )
        layers = list(self._network.modules())
        dropouts = [layer for layer in layers if isinstance(layer, StackedDropout)]
        self.random_layers = len(dropouts)
        """Layers that draw random numbers in training."""
        self.masked = any(isinstance(layer, StackedBatchNorm2d) for layer in layers)
        """Whether it must know which slots hold samples."""

    def __call__(
        self,
        tensors: dict[str, Tensor],
        x: Tensor,
        *,
        training: bool = False,
        valid: Tensor | None = None,
        keys: Tensor | None = None,
        sinks: dict[str, Tensor] | None = None,
        updates: dict[str, linear.Update] | None = None,
    ) -> Tensor:
        """Pass [clients · slots, …] forward through tensors [clients, …].

        Gradients of a tensor may be written to its sink, in the shape of the tensor,
        instead of new memory; they are there after `join`. Weights named in `updates`
        update themselves in the backward pass and have no gradient.
        """
        batch = self._batch
        batch.num_clients = len(next(iter(tensors.values())))
        batch.valid = valid
        batch.keys = keys
        batch.sinks = dict(sinks or {})  # a copy: layers take their sinks out
        batch.updates = updates or {}
        # Walks over all modules, so only where something changes.
        if self._network.training != training:
            self._network.train(training)
        # Our own kernels, for several clients, know no bfloat16.
        autocast = self._bf16 and x.is_cuda and batch.num_clients == 1
        with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
            y: Tensor = torch.func.functional_call(self._network, tensors, (x,))
            return y.to(x.dtype)

    def updating(self, tensors: dict[str, Tensor], slots: int) -> list[str]:
        """Return the weights that should update themselves in a step.

        Never those of the first layer: its input needs no gradient, which is what the
        update is made together with.
        """
        several = len(next(iter(tensors.values()))) > 1
        if not several:
            return []
        layers = []
        for module in self._network.modules():
            if isinstance(module, StackedConv2d | StackedLinear):
                layers.append(module)
        # In the network's order, which is the order of `modules`.
        names = []
        for layer in layers[1:]:
            name = layer.name + "weight"
            if isinstance(layer, StackedLinear) and linear.updates_itself(
                tensors[name], slots
            ):
                names.append(name)
        return names

    def join(self) -> None:
        """Wait for gradients that go to sinks."""
        self._batch.branch.join()


def _stacked(
    module: nn.Module, batch: Batch, name: str, numbers: Iterator[int]
) -> nn.Module:
    """Replace a module, or all layers in it, by stacked ones.

    `name` is the prefix of its tensors' names; `numbers` count random layers.
    """
    # By exact type: a subclass may compute something else.
    stacked_layer = STACKED_LAYERS.get(type(module))
    if stacked_layer is not None:
        return stacked_layer(module, batch, name, numbers)
    parameters = module.named_parameters(recurse=False)
    buffers = module.named_buffers(recurse=False)
    # Tensors outside of known layers would be shared by all clients, silently.
    tensors = [tensor_name for tensor_name, _ in (*parameters, *buffers)]
    if tensors:
        known = ", ".join(plain.__name__ for plain in STACKED_LAYERS)
        raise TypeError(
            f"{type(module).__name__} has tensors of its own ({', '.join(tensors)}); "
            f"layers that stack: {known}"
        )
    for child_name, child in module.named_children():
        stacked_child = _stacked(child, batch, f"{name}{child_name}.", numbers)
        setattr(module, child_name, stacked_child)
    if isinstance(module, nn.Sequential):
        _fuse(module)
    return module


def _fuse(layers: nn.Sequential) -> None:
    """Let convolutions do the activation and the pooling that follow them.

    Our kernel does all three without the convolution's output in memory.
    """
    names = list(layers._modules)
    for i, name in enumerate(names):
        conv = layers._modules[name]
        if not isinstance(conv, StackedConv2d) or i + 1 == len(names):
            continue
        activation = layers._modules[names[i + 1]]
        if isinstance(activation, nn.LeakyReLU):
            conv.slope = activation.negative_slope
        elif isinstance(activation, nn.ReLU):
            conv.slope = 0.0
        else:
            continue
        # In place of the activation, so that names and order of layers stay.
        setattr(layers, names[i + 1], nn.Identity())
        # The kernel pools before the activation, which must not turn the order around.
        if i + 2 < len(names) and conv.slope >= 0:
            pool = layers._modules[names[i + 2]]
            if isinstance(pool, nn.MaxPool2d) and _is_plain_pool(pool):
                conv.pool = True
                setattr(layers, names[i + 2], nn.Identity())


def _is_plain_pool(pool: nn.MaxPool2d) -> bool:
    """Whether the pooling takes 2×2 pixels, every 2 pixels, and nothing else."""
    two = (2, (2, 2))
    return (
        pool.kernel_size in two
        and pool.stride in two
        and pool.padding in (0, (0, 0))
        and pool.dilation in (1, (1, 1))
        and not pool.ceil_mode
        and not pool.return_indices
    )
