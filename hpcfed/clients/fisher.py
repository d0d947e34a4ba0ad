"""The diagonal of the Fisher information: what every parameter of a client's row means
to its answers.

It is the mean over the client's samples of (∂ log p(y|x) / ∂θ)². A sample must have a
gradient of its own, so batch norm takes its running statistics and nothing is dropped,
as when a row is judged. Samples do not meet then, and one backward pass has each
sample's gradient of each layer's output. With the layer's input that makes the
gradients of its parameters, one layer after the other.
"""

import copy
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from hpcfed.data.shards import Shard
from hpcfed.kernels import cuda
from hpcfed.models.cost import Cost
from hpcfed.models.layout import Layout

MEMORY_SHARE = 0.1
"""Of the device's free memory, for gradients and activations that are there at once."""
CPU_FLOATS = 2**27
"""The same on a CPU; more gain nothing there."""

Tensors = dict[str, Tensor]


class Fisher:
    def __init__(self, network: nn.Module, layout: Layout, cost: Cost) -> None:
        self._network = network
        self._layout = layout
        self._floats = 4 * cost.activations + 2 * max(
            prod(e.shape) for e in layout.entries
        )
        """Of a sample: what layers put out, its gradient and patches of it, and the
        gradient of one layer's weight.
        """
        self._at_once = 0
        """Samples that fit into free memory; asked once, because asking takes time."""

    def __call__(self, rows: Tensor, shard: Shard, clients: np.ndarray) -> Tensor:
        """Of `rows[i]` on the data of the shard's client `clients[i]`; 0 without data,
        and for running statistics.
        """
        self._at_once = self._at_once or max(1, _floats_at_once(rows) // self._floats)
        found = torch.zeros_like(rows)
        tensors, sums = self._layout.views(rows), self._layout.views(found)
        sizes = np.asarray(shard.sizes, np.int64)[clients]
        with cuda.without_trials():  # which would take longer than these passes
            for i, (client, size) in enumerate(zip(clients, sizes, strict=True)):
                row, sum_of = (
                    {name: tensor[i] for name, tensor in own.items()}
                    for own in (tensors, sums)
                )
                for batch in shard.index[client, :size].split(self._at_once):
                    self._add(sum_of, row, shard.images[batch], shard.labels[batch])
                found[i] /= max(1, size)
        return found

    def _add(self, sums: Tensors, row: Tensors, images: Tensor, labels: Tensor) -> None:
        """Adds up the samples' squared gradients of every parameter."""

        def passed(
            name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
        ) -> None:
            """The hook keeps to what a layer put out, whatever is done in place to it
            later.
            """
            output.register_hook(partial(returned, name, module, inputs[0].detach()))

        def returned(name: str, module: nn.Module, x: Tensor, dy: Tensor) -> None:
            own = {
                key.removeprefix(f"{name}."): tensor
                for key, tensor in row.items()
                if key.startswith(f"{name}.")
            }
            for key, squares in SQUARES[type(module)](module, own, x, dy).items():
                sums[f"{name}.{key}"] += squares

        network = self._judging()
        layers = [
            (name, module)
            for name, module in network.named_modules()
            if module._parameters
        ]
        handles = [
            module.register_forward_hook(partial(passed, name))
            for name, module in layers
        ]
        try:
            with torch.enable_grad():
                images = (
                    images.detach().requires_grad_()
                )  # so that there is a backward pass; parameters take no part
                loss = F.cross_entropy(
                    functional_call(network, row, (images,)), labels, reduction="sum"
                )
                torch.autograd.grad(loss, images)
        finally:
            for handle in handles:
                handle.remove()

    def _judging(self) -> nn.Module:
        """The network as it judges; only its structure is used."""
        if self._network.training:
            self._network = copy.deepcopy(self._network).eval()
        return self._network


def _of_convolution(module: Any, own: Tensors, x: Tensor, dy: Tensor) -> Tensors:
    """Every sample's gradient is a product of its own: of what comes back to each
    position with the patch around it.
    """
    patches = F.unfold(
        x, module.kernel_size, module.dilation, module.padding, module.stride
    )
    gradients = torch.bmm(dy.flatten(2), patches.transpose(1, 2))
    squares = {"weight": gradients.square_().sum(0).view_as(own["weight"])}
    return squares | ({"bias": dy.sum((2, 3)).square().sum(0)} if "bias" in own else {})


def _of_linear(module: Any, own: Tensors, x: Tensor, dy: Tensor) -> Tensors:
    """A sample's gradient is an outer product, whose square is that of the squares."""
    squares = {"weight": dy.square().t() @ x.square()}
    return squares | ({"bias": dy.square().sum(0)} if "bias" in own else {})


def _of_batch_norm(module: Any, own: Tensors, x: Tensor, dy: Tensor) -> Tensors:
    mean, deviation = own["running_mean"], (own["running_var"] + module.eps).sqrt()
    normal = (x - mean[:, None, None]) / deviation[:, None, None]
    return {
        key: part.sum((2, 3)).square().sum(0)
        for key, part in (("weight", dy * normal), ("bias", dy))
    }


SQUARES: dict[type[nn.Module], Callable[[Any, Tensors, Tensor, Tensor], Tensors]] = {
    nn.Conv2d: _of_convolution,
    nn.Linear: _of_linear,
    nn.BatchNorm2d: _of_batch_norm,
}
"""By kind of layer: its parameters' squared gradients, summed over samples, from its
own tensors, its input, and the gradient of its output.
"""


def _floats_at_once(rows: Tensor) -> int:
    if rows.device.type == "cpu":
        return CPU_FLOATS
    free, _ = torch.cuda.mem_get_info(rows.device)
    return int(MEMORY_SHARE * free / rows.element_size())
