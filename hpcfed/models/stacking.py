"""Replaces the layers of a network by stacked ones: finds its tensors, and the layers
that must know which sample belongs to which client.
"""

import copy
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hpcfed.errors import UserError
from hpcfed.models.layout import Layout, idle_counters
from hpcfed.models.lora import LoraLinear
from hpcfed.models.stacked_convolutions import StackedConv1d, StackedConv2d
from hpcfed.models.stacked_layer import Batch, StackedLayer
from hpcfed.models.stacked_layers import (
    StackedBatchNorm1d,
    StackedBatchNorm2d,
    StackedDropout,
    StackedEmbedding,
    StackedGroupNorm,
    StackedLayerNorm,
    StackedLinear,
    StackedLora,
    StackedRMSNorm,
)
from hpcfed.models.stacked_recurrent import StackedGRU, StackedLSTM

# torchvision's ResNets, stacked. Batch norms also do the residual sums and activations
# that follow them, which takes fewer passes over memory.


_SOURCE = "torchvision.models.resnet"


class ResidualBlock(nn.Module):
    """Two convolutions with a skip connection; replaces torchvision's BasicBlock.

    It has the block's layers under their names.
    """

    conv1: nn.Module
    bn1: StackedBatchNorm2d
    conv2: nn.Module
    bn2: StackedBatchNorm2d
    downsample: nn.Module

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        for name, layer in block.named_children():
            self.add_module(name, layer)
        # The block's single ReLU is applied after both norms.
        for norm in (self.bn1, self.bn2):
            norm.slope = 0.0
        self.has_downsample = "downsample" in self._modules

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn1(self.conv1(x))
        residual = self.downsample(x) if self.has_downsample else x
        z: Tensor = self.bn2(self.conv2(y), residual)
        return z


def fused(module: nn.Module) -> nn.Module:
    """Return an adapted layer, or a module of torchvision's ResNets, with fused layers;
    any other unchanged.

    Its layers must already be stacked.
    """
    if type(module) is LoraLinear and _is_adapter(module):
        return StackedLora(module)
    # A torchvision network has already imported it; others do not need it.
    resnet = sys.modules.get(_SOURCE)
    if resnet is None:
        return module
    if type(module) is resnet.BasicBlock and _has_norms(module, "bn1", "bn2"):
        return ResidualBlock(module)
    if type(module) is resnet.ResNet and _has_norms(module, "bn1"):
        # The stem is the only user of this ReLU: blocks have their own.
        norm = module.bn1
        assert isinstance(norm, StackedBatchNorm2d)
        norm.slope = 0.0
        module.relu = nn.Identity()
    return module


def _is_adapter(module: LoraLinear) -> bool:
    """Whether the adapter is stacked, and the layer below is a constant of its own."""
    frozen = not isinstance(module.base, StackedLayer)
    layers = (module.down, module.up)
    return frozen and all(type(layer) is StackedLinear for layer in layers)


def _has_norms(module: nn.Module, *names: str) -> bool:
    """Whether norms are stacked ones, and what follows them is a ReLU."""
    layers = module._modules
    norms = [layers.get(name) for name in names]
    stacked = all(type(norm) is StackedBatchNorm2d for norm in norms)
    return stacked and type(layers.get("relu")) is nn.ReLU


STACKED_LAYERS: dict[type[nn.Module], type[StackedLayer]] = {
    nn.Conv2d: StackedConv2d,
    nn.Linear: StackedLinear,
    nn.Conv1d: StackedConv1d,
    nn.BatchNorm1d: StackedBatchNorm1d,
    nn.BatchNorm2d: StackedBatchNorm2d,
    nn.Dropout: StackedDropout,
    nn.LayerNorm: StackedLayerNorm,
    nn.RMSNorm: StackedRMSNorm,
    nn.GroupNorm: StackedGroupNorm,
    nn.Embedding: StackedEmbedding,
    nn.GRU: StackedGRU,
    nn.LSTM: StackedLSTM,
}
"""By exact type: a subclass may compute something else."""

Wrap = Callable[[StackedLayer, nn.Module], nn.Module]
"""Takes a stacked layer and the plain one; returns the replacement."""


@dataclass
class Names:
    """Which tensors of a network belong to clients."""

    rows: frozenset[str]
    """Names of the tensors that rows hold."""
    canonical: dict[str, str]
    """The first name of every tensor: tied weights have several."""

    @classmethod
    def of(cls, network: nn.Module, layout: Layout) -> "Names":
        first: dict[int, str] = {}
        canonical = {}
        for name, parameter in network.named_parameters(remove_duplicate=False):
            canonical[name] = first.setdefault(id(parameter), name)
        return cls(frozenset(e.name for e in layout.entries), canonical)

    @property
    def tied(self) -> set[str]:
        """First names of the tensors that have several names."""
        return {first for name, first in self.canonical.items() if name != first}

    def in_rows(self, name: str) -> bool:
        return self.canonical.get(name, name) in self.rows


def stacked(
    network: nn.Module, names: Names, batch: Batch, wrap: Wrap, *, fold: bool
) -> nn.Module:
    """Return a copy of a network in which layers with clients' tensors are stacked.

    With `fold`, clients are folded into the batch. Then a module with its own clients'
    tensors outside of known layers raises a TypeError: all clients would silently share
    them.
    """
    numbers = itertools.count()
    return _stacked(copy.deepcopy(network), names, batch, wrap, "", numbers, fold)


def _stacked(
    module: nn.Module,
    names: Names,
    batch: Batch,
    wrap: Wrap,
    prefix: str,
    numbers: Iterator[int],
    fold: bool,
) -> nn.Module:
    own = []
    for name, _ in (
        *module.named_parameters(recurse=False, remove_duplicate=False),
        *module.named_buffers(recurse=False),
    ):
        if names.in_rows(prefix + name):
            own.append(name)
    layer = STACKED_LAYERS.get(type(module))
    # A layer with only constants treats the samples of all clients alike.
    if layer is not None and (own or layer is StackedDropout):
        return wrap(layer(module, batch, prefix, numbers), module)
    if own and fold:
        raise TypeError(
            f"{type(module).__name__} has tensors of its own ({', '.join(own)})"
        )
    for name, child in module.named_children():
        inside = f"{prefix}{name}."
        new = _stacked(child, names, batch, wrap, inside, numbers, fold)
        setattr(module, name, new)
    if isinstance(module, nn.Sequential):
        _fuse(module)
        _flatten(module)
    return fused(module)


def _fuse(layers: nn.Sequential) -> None:
    """Let convolutions do the activation and the pooling that follow them, and batch
    norms and linear layers the activation.

    Our kernels do all of it without writing intermediate results to memory.
    """
    names = list(layers._modules)
    for i, name in enumerate(names):
        layer = layers._modules[name]
        if not isinstance(layer, StackedConv2d | StackedBatchNorm2d | StackedLinear):
            continue
        if i + 1 == len(names):
            continue
        activation = layers._modules[names[i + 1]]
        if isinstance(activation, nn.LeakyReLU):
            slope = activation.negative_slope
        elif isinstance(activation, nn.ReLU):
            slope = 0.0
        else:
            continue
        # The backward kernel asks the output whether the layer's sum was positive.
        if slope < 0 and isinstance(layer, StackedLinear):
            continue
        layer.slope = slope
        # Replace the activation, so that names and order of layers stay.
        setattr(layers, names[i + 1], nn.Identity())
        # The kernel pools before the activation, so the activation must keep order.
        if isinstance(layer, StackedConv2d) and i + 2 < len(names) and layer.slope >= 0:
            pool = layers._modules[names[i + 2]]
            if isinstance(pool, nn.MaxPool2d) and _is_plain_pool(pool):
                layer.pool = True
                setattr(layers, names[i + 2], nn.Identity())


def _flatten(layers: nn.Sequential) -> None:
    """Let dropout flatten images, if that follows: one pass for both."""
    names = list(layers._modules)
    for name, following in itertools.pairwise(names):
        dropout = layers._modules[name]
        flatten = layers._modules[following]
        if not isinstance(dropout, StackedDropout) or type(flatten) is not nn.Flatten:
            continue
        if (flatten.start_dim, flatten.end_dim) == (1, -1):
            dropout.flat = True
            setattr(layers, following, nn.Identity())


def _is_plain_pool(pool: nn.MaxPool2d) -> bool:
    """Whether the pooling takes 2×2 pixels, every 2 pixels, without further options."""
    two = (2, (2, 2))
    return (
        pool.kernel_size in two
        and pool.stride in two
        and pool.padding in (0, (0, 0))
        and pool.dilation in (1, (1, 1))
        and not pool.ceil_mode
        and not pool.return_indices
    )


class SharedTensors:
    """The tensors of a network that are not part of rows: frozen parameters, masks,
    tables.

    They are on the device once, for all clients.
    """

    def __init__(self, network: nn.Module, names: Names) -> None:
        self._network = network
        self._names = names
        self._at: tuple[torch.device, torch.dtype] | None = None
        self._of_layers: dict[str, Tensor] = {}
        self._watched: list[tuple[nn.Module, str, str, Tensor, int]] = []
        """Buffers: their module, own name, full name, tensor and version."""

    @property
    def floats(self) -> int:
        """The numbers of the frozen parameters."""
        total = 0
        for name, parameter in self._network.named_parameters():
            if not self._names.in_rows(name):
                total += parameter.numel()
        return total

    def move(self, like: Tensor, *, halves: bool = False) -> None:
        """Move them to the rows' device and type; `halves`: frozen parameters become
        bfloat16.
        """
        if self._at == (like.device, like.dtype):
            return
        self._of_layers = {}
        self._watched = []
        counters = idle_counters(self._network)
        for prefix, module in self._network.named_modules():
            dot = f"{prefix}." if prefix else ""
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is None or self._names.in_rows(dot + name):
                        continue
                    dtype = like.dtype if tensor.is_floating_point() else None
                    # Not buffers: the angles of rotary positions need their digits.
                    if halves and table is module._parameters:
                        dtype = torch.bfloat16
                    # `data`, so that the tensor stays the same object: modules may hold
                    # it elsewhere, too.
                    tensor.data = tensor.data.to(like.device, dtype)
                    if isinstance(module, StackedLayer):
                        self._of_layers[dot + name] = tensor.data
                    elif table is module._buffers and dot + name not in counters:
                        watched = (module, name, dot + name, tensor, tensor._version)
                        self._watched.append(watched)
        self._at = (like.device, like.dtype)

    def check(self) -> None:
        """Refuse a module that has changed a constant in training.

        It did not do so in the trial, or its row would hold the buffer. Here all
        clients share it.
        """
        for module, name, whole_name, tensor, version in self._watched:
            current = module._buffers.get(name)
            if current is tensor and tensor._version == version:
                continue
            # Put the constant back: the next step, perhaps a captured one, must read
            # this memory.
            if current is not tensor and _is_as_good(current, tensor):
                module._buffers[name] = tensor
                continue
            raise UserError(
                f"the network changes its buffer {whole_name} in training, but did "
                "not change it in the trial before the run, so all clients share it; "
                "write to it in every call to give each client its own"
            )

    def expanded(self, clients: int) -> dict[str, Tensor]:
        """Return the constants of stacked layers, with a clients' dimension."""
        found = {}
        for name, tensor in self._of_layers.items():
            found[name] = tensor.expand(clients, *tensor.shape)
        return found


def _is_as_good(assigned: Tensor | None, constant: Tensor) -> bool:
    """Tell whether a module has replaced a constant by the same numbers, or by a cache
    of another shape, which no row could hold.
    """
    if assigned is None or assigned.shape != constant.shape:
        return True
    if torch._C._functorch.is_batchedtensor(assigned):
        return False
    return torch.equal(assigned, constant)
