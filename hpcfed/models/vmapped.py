"""Calls a network of any module that `torch.func.vmap` supports, for many clients.

vmap hides the clients' dimension from the module, so whatever the module does with its
tensors is right. Layers that we know step out of vmap: they see all clients at once, as
in a stacked network, with the same kernels and the same random numbers.
"""

import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hpcfed.models.forward import CaughtCalls, Forward
from hpcfed.models.layout import Changes, Layout, uncounted
from hpcfed.models.own import answers
from hpcfed.models.stacked_layer import Batch, StackedLayer
from hpcfed.models.stacked_layers import StackedBatchNorm2d, StackedDropout
from hpcfed.models.stacking import Names, stacked

Run = Callable[..., Any]
_FUSED = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
]
"""All kernels of attention."""

# Operations without a vmap rule run client by client. The run already reports how its
# network is called, and torch's warning would add nothing.
warnings.filterwarnings("ignore", message="There is a performance drop because")


class VmapNetwork(Forward):
    """Calls a network for many clients by vmap."""

    def __init__(
        self,
        network: nn.Module,
        layout: Layout,
        *,
        contiguous: bool = False,
        drops: int = 0,
    ) -> None:
        """`contiguous`: a module needs images in torch's default layout. `drops`:
        functional dropout calls in a training pass.
        """
        self._pass = _Pass()
        self._buffers = [e for e in layout.entries if not e.trainable]
        self._changes = Changes()
        self._names = Names.of(network, layout)
        batch = Batch(contiguous=contiguous)
        made = stacked(network, self._names, batch, self._bridge, fold=False)
        bridged = [each.layer for each in made.modules() if isinstance(each, Bridge)]
        layers = sum(isinstance(layer, StackedDropout) for layer in bridged)
        super().__init__(made, self._names, batch, layers=layers, drops=drops)
        self.masked = any(isinstance(layer, StackedBatchNorm2d) for layer in bridged)

    def _bridge(self, layer: StackedLayer, plain: nn.Module) -> nn.Module:
        return Bridge(layer, self._pass)

    def _outputs(self, tensors: dict[str, Tensor], x: Tensor, like: Tensor) -> Tensor:
        clients = len(like)
        training = self._network.training
        self._pass.tensors = {
            **self._shared_of_bridges(clients),
            **self._all_names(tensors),
        }

        def one_client(tensors: dict[str, Tensor], anchor: Tensor, x: Tensor) -> Any:
            self._pass.anchor = anchor
            before = dict(tensors)
            y = answers(torch.func.functional_call(self._network, tensors, x))
            # What the module has assigned anew, not changed in place.
            assigned = {}
            for e in self._buffers:
                if training and tensors[e.name] is not before[e.name]:
                    assigned[e.name] = tensors[e.name]
            return y, assigned

        anchors = x.new_zeros(clients, dtype=like.dtype)
        if self._batch.contiguous:
            x = x.contiguous()
        by_client = x.unflatten(0, (clients, -1))
        taken = dict(tensors)
        for e in self._buffers:
            taken[e.name] = e.taken(uncounted(tensors[e.name]))
        caught = self._catching_drops(self._pass.out)
        try:
            # Some attention stays within vmap, such as that of torch's own encoder.
            # Fused kernels have no vmap rule, and on a GPU they refuse its strides.
            with sdpa_kernel(SDPBackend.MATH), _Attention(self._pass), caught:
                # randomness="error" would also refuse random numbers of modules that
                # are not in training.
                y, assigned = torch.func.vmap(one_client)(taken, anchors, by_client)
        finally:
            self._pass.tensors = {}
            self._pass.anchor = None
        self._changes.forget()
        for e in self._buffers if training else ():
            changed = assigned.get(e.name, taken[e.name])
            self._changes.note(e, tensors[e.name], taken[e.name], changed)
        outputs: Tensor = y
        return outputs.flatten(0, 1)

    def _all_names(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors under all their names, if weights are tied."""
        found = dict(tensors)
        for name, first in self._names.canonical.items():
            if first in tensors:
                found[name] = tensors[first]
        return found

    def _shared_of_bridges(self, clients: int) -> dict[str, Tensor]:
        found = {}
        for module in self._network.modules():
            if not isinstance(module, Bridge):
                continue
            for name, tensor in module.named_tensors():
                if not self._names.in_rows(name):
                    found[name] = tensor.expand(clients, *tensor.shape)
        return found

    def join(self) -> None:
        """Wait for gradients that go to sinks, and write changed buffers to rows."""
        super().join()
        self._changes.write()


class _Pass:
    """What layers need to step out of vmap, during one forward pass."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        """Tensors with the clients' dimension, by name."""
        self.anchor: Tensor | None = None
        """A number that vmap maps over, so that a layer is called for all clients even
        if its input does not depend on them.
        """

    def out(self, run: Run, *inputs: Tensor) -> Any:
        """Call a function for all clients at once, from within vmap."""
        assert self.anchor is not None
        return _StepOut.apply(run, self.anchor, *inputs)


class _StepOut(torch.autograd.Function):
    """Not a real function: a way to get hold of all clients' tensors.

    Autograd follows what `run` does.
    """

    @staticmethod
    def forward(run: Run, anchor: Tensor, *inputs: Tensor) -> Any:
        raise AssertionError("called outside of vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], run: Run, _: Tensor, *inputs: Tensor
    ) -> tuple[Any, Any]:
        by_client = []
        for tensor, dim in zip(inputs, in_dims[2:], strict=True):
            if dim is None:
                by_client.append(tensor.expand(info.batch_size, *tensor.shape))
            else:
                by_client.append(tensor.movedim(dim, 0))
        y = run(*by_client)
        return y, torch.utils._pytree.tree_map(lambda _: 0, y)


class Bridge(nn.Module):
    """Replaces a layer, and calls the stacked layer for all clients."""

    def __init__(self, layer: StackedLayer, current: _Pass) -> None:
        super().__init__()
        # The layer's tensors under the same names, so that vmap's are found here. The
        # layer itself is not a submodule, so its names are not part of the network.
        for name, parameter in layer.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in layer.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        object.__setattr__(self, "layer", layer)
        self._current = current

    layer: StackedLayer

    def __getattr__(self, name: str) -> Any:
        """Look up what a module may ask of its layer, such as a dropout's p."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "layer" not in self.__dict__:  # while it is being made or copied
                raise
            return getattr(self.layer, name)

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """Return this layer's tensors by their names in the network."""
        found = []
        for table in (self._parameters, self._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    found.append((self.layer.name + name, tensor))
        return found

    def train(self, mode: bool = True) -> "Bridge":
        self.layer.train(mode)
        super().train(mode)
        return self

    def forward(self, *inputs: Tensor) -> Any:
        tensors = {}
        for name in (*self._parameters, *self._buffers):
            full = self.layer.name + name
            if full in self._current.tensors:
                tensors[name] = self._current.tensors[full]

        def run(*by_client: Tensor) -> Any:
            named = {f"layer.{name}": tensor for name, tensor in tensors.items()}
            module = _ByClient(self.layer)
            return torch.func.functional_call(module, named, by_client)

        return self._current.out(run, *inputs)


class _ByClient(nn.Module):
    """A module that calls a layer's `by_client`."""

    def __init__(self, layer: StackedLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Tensor) -> Any:
        return self.layer.by_client(*inputs)


class _Attention(CaughtCalls):
    """Lets attention step out of vmap, which would call it by client on a CPU."""

    instead: ClassVar = {F.scaled_dot_product_attention: "_attention"}

    def __init__(self, current: _Pass) -> None:
        super().__init__()
        self._current = current

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **others: Any,
    ) -> Any:
        attention = F.scaled_dot_product_attention
        more: dict[str, Any] = {
            "dropout_p": dropout_p,
            "is_causal": is_causal,
            **others,
        }
        # Dropout is left to vmap, which refuses to draw: clients' keys are not used
        # there.
        if query.dim() < 3 or dropout_p:
            return attention(query, key, value, attn_mask, **more)

        def run(*by_client: Tensor) -> Tensor:
            query, key, value, *masks = by_client
            mask = _folded_mask(masks[0], query) if masks else None
            # Outside of vmap torch can choose the fastest kernel.
            with sdpa_kernel(_FUSED):
                y = attention(
                    query.flatten(0, 1),
                    key.flatten(0, 1),
                    value.flatten(0, 1),
                    mask,
                    **more,
                )
            return y.unflatten(0, query.shape[:2])

        masks = [] if attn_mask is None else [attn_mask]
        return self._current.out(run, query, key, value, *masks)


def _folded_mask(mask: Tensor, query: Tensor) -> Tensor:
    """Fold a mask [clients, …], whose last dimensions match the query's."""
    ones = [1] * (query.dim() - mask.dim())
    aligned = mask.view(len(mask), *ones, *mask.shape[1:])
    clients, samples = query.shape[:2]
    return aligned.expand(clients, samples, *aligned.shape[2:]).flatten(0, 1)
