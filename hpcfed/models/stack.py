"""A network stacked over clients: one forward pass for many clients, each with its own
weights.

Clients are folded into the batch dimension, client by client: activations are [clients
· slots, …]. Everything that treats samples alike (activations, pooling, flatten,
attention, residual sums) then works unchanged. Only layers with weights, and dropout,
must know which sample belongs to which client; these are in `stacked_layers`. So any
torch module made of such layers can be stacked, unless it uses its tensors in other
ways; `vmapped` is for those. A stack of one client runs torch's own kernels, so a large
network pays nothing for being stackable.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from hpcfed.kernels import convolution, cuda, linear
from hpcfed.models.blocks import Blocks
from hpcfed.models.cost import Cost
from hpcfed.models.forward import Forward, FunctionalDropout
from hpcfed.models.layout import Layout
from hpcfed.models.quick import quick
from hpcfed.models.recompute import recompute
from hpcfed.models.stacked_convolutions import StackedConv2d
from hpcfed.models.stacked_layer import Batch, StackedLayer
from hpcfed.models.stacked_layers import (
    StackedBatchNorm2d,
    StackedDropout,
    StackedEmbedding,
    StackedLayerNorm,
    StackedLinear,
    StackedLora,
    StackedRMSNorm,
)
from hpcfed.models.stacking import Names, stacked
from hpcfed.models.substitution import Substitution
from hpcfed.runtime.accelerator import is_gpu

TAKE_HALVES = (
    StackedLinear,
    StackedDropout,
    StackedEmbedding,
    StackedLayerNorm,
    StackedRMSNorm,
)
"""Layers that compute in bfloat16 for several clients."""


class StackedNetwork(Forward):
    """A network whose layers with weights or random numbers are stacked."""

    capture_may_fail = False
    takes_halves = True

    def __init__(
        self,
        network: nn.Module,
        layout: Layout | None = None,
        *,
        bf16: bool = False,
        halves: bool = False,
        together: bool = True,
        contiguous: bool = False,
        drops: int = 0,
    ) -> None:
        """`halves`: weights of layers may come in bfloat16, because only the layers use
        them. `together`: with `bf16`, a frozen network computes in it for all clients;
        otherwise only a client that is alone does. `contiguous`: a module needs images
        in torch's default layout. `drops`: functional dropout calls in a training pass.
        """
        self._bf16 = bf16
        self._halves = bf16 and halves
        batch = Batch(contiguous=contiguous)
        names = Names.of(network, layout or Layout.of(network))
        made = stacked(network, names, batch, _in_place, fold=True)
        modules = list(made.modules())
        layers = sum(isinstance(module, StackedDropout) for module in modules)
        super().__init__(made, names, batch, layers=layers, drops=drops)
        self.masked = any(isinstance(each, StackedBatchNorm2d) for each in modules)
        self._fused: set[str] = set()
        """Weights of adapters: their layers are never called, and they round themselves."""
        for each in modules:
            if isinstance(each, StackedLora):
                self._fused |= {each.down.name + "weight", each.up.name + "weight"}
        self.over_halves = bf16 and together and self._has_base()
        if self.over_halves:
            self._network = quick(self._network)
        self._with = Substitution(self._network)
        self._weighted: list[StackedLayer] = []
        """Convolutions and linear layers, in the network's order."""
        for each in self._network.modules():
            if isinstance(each, StackedConv2d | StackedLinear):
                self._weighted.append(each)
        self._recomputes = False
        self._caught: FunctionalDropout | None = None
        """What catches dropout calls of the current pass."""

    def recompute(self, blocks: Blocks) -> None:
        """Let blocks compute their activations again in the backward pass."""
        recompute(blocks.of(self._network), lambda: self._caught)
        self._recomputes = True

    def _has_base(self) -> bool:
        """Tell whether most of the network is frozen, and all else takes bfloat16."""
        own = 0
        for module in self._network.modules():
            if not isinstance(module, StackedLayer):
                continue
            if not isinstance(module, TAKE_HALVES):
                return False
            own += sum(p.numel() for p in module.parameters(recurse=False))
        return self._shared.floats > own

    def _outputs(self, tensors: dict[str, Tensor], x: Tensor, like: Tensor) -> Tensor:
        shared = self._shared.expanded(len(like))
        if self._batch.contiguous:
            x = x.contiguous()
        if self._recomputes:
            # A layer takes its sink once, and would be called twice.
            self._batch.sinks = {}
        if self.over_halves:
            return self._over_halves({**shared, **tensors}, x)
        # Our own kernels, for several clients, do not support bfloat16.
        halves = self._bf16 and self._batch.num_clients == 1
        autocast = halves and is_gpu(x.device)
        with self._catching_drops():
            if not autocast:
                return self._with({**shared, **tensors}, x)
            with torch.autocast(x.device.type, torch.bfloat16):
                return self._with({**shared, **tensors}, x)

    def _over_halves(self, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        """Compute in bfloat16; adapters come and get their gradients in their own type."""
        halves = {}
        for name, tensor in tensors.items():
            fused = name in self._fused
            halves[name] = tensor if fused else tensor.to(torch.bfloat16)
        if x.is_floating_point():
            x = x.to(torch.bfloat16)
        # Sinks are float32: autograd converts the gradients of rounded weights.
        sinks = self._batch.sinks
        self._batch.sinks = {n: sink for n, sink in sinks.items() if n in self._fused}
        with self._catching_drops():
            return self._with(halves, x)

    def _catching_drops(
        self, out: Callable[..., Any] | None = None
    ) -> AbstractContextManager[object]:
        catching = super()._catching_drops(out)
        self._caught = catching if isinstance(catching, FunctionalDropout) else None
        return catching

    def copies(self, like: Tensor) -> int:
        """Return how many copies of a row to use as clients when evaluating it.

        Our convolutions need at least two clients. For the few channels of clients'
        networks they are several times faster than torch's.
        """
        convolutions = []
        for module in self._network.modules():
            if isinstance(module, StackedConv2d):
                convolutions.append(module)
        ours = all(layer.may_use_kernel(like) for layer in convolutions)
        # In bfloat16 torch's convolutions are as fast, and a stack of one may use it.
        return 2 if convolutions and ours and not self._bf16 else 1

    def kernel_sources(
        self, cost: Cost, like: Tensor, slots: int, *, bounded: bool
    ) -> Iterator[tuple[str, cuda.Macros]]:
        """Yield the sources of convolutions and linear layers of several clients, for
        rows as `like` and so many slots. Gradients are `bounded` if those of the outputs
        are at most 1.
        """
        shapes = {layer.weight: layer.inputs for layer in cost.layers}
        for number, layer in enumerate(self._weighted):
            first = number == 0
            if isinstance(layer, StackedLinear):
                yield from layer.kernel_sources(slots, first=first)
                continue
            shape = shapes.get(layer.name + "weight", ())
            if not isinstance(layer, StackedConv2d) or len(shape) != 3:
                continue
            if not layer.may_use_kernel(like):
                continue
            known = layer.kernel_layer_of(shape, like.device.index, bounded=bounded)
            if known is not None:
                yield from convolution.sources(
                    known, like.device.index, first=first, bounded=bounded
                )

    def halved(self, clients: int, device: torch.device) -> set[str]:
        """Return the weights that may be bfloat16: they are rounded anyway."""
        if self.over_halves:
            return self._fused - self._tied
        if not self._halves or clients > 1 or not is_gpu(device):
            return set()
        return {layer.name + "weight" for layer in self._weighted} - self._tied

    def updating(self, tensors: dict[str, Tensor], slots: int) -> list[str]:
        """Return the weights that should update themselves in a step.

        Never those of the first layer: the update is made together with the gradient of
        the layer's input, which the first layer does not need.
        """
        # One client's layers run torch's own product, whose gradient is a tensor as
        # usual.
        several = len(next(iter(tensors.values()))) > 1
        # A weight that is rounded to bfloat16 would only update the rounded copy.
        if not several or self.over_halves or self._recomputes:
            return []
        names = []
        for layer in self._weighted[1:]:
            name = layer.name + "weight"
            # Layers must not update frozen and tied weights, nor those of adapters.
            if name in self._tied | self._fused or name not in tensors:
                continue
            if isinstance(layer, StackedLinear) and linear.updates_itself(
                tensors[name], slots
            ):
                names.append(name)
        return names


def _in_place(layer: StackedLayer, plain: nn.Module) -> nn.Module:
    return layer
