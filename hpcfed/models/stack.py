"""A network stacked over clients: one forward pass for many clients, each with its own weights.

Clients are folded into the batch dimension, client by client: activations are [clients · slots, …]. Everything that
treats samples alike (activations, pooling, flatten, residual sums) is then right as it stands, so any torch module made
of the layers below can be stacked; only layers with weights, batch norm and dropout must know whose sample is whose.
A stack of one client runs torch's own kernels, so a large network pays nothing for being stackable.
"""

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcfed import streams


@dataclass
class Batch:
    """What layers need to know of the batch that is passing through."""

    num_clients: int = 1
    valid: Tensor | None = None
    """[clients, slots], True where a slot holds a sample; None when all do."""
    keys: Tensor | None = None
    """[clients] keys of this step's random numbers; None outside of training."""


class StackedNetwork:
    """The network with its weighty layers exchanged for stacked ones."""

    def __init__(self, network: nn.Module) -> None:
        self._batch = Batch()
        self._network = _stacked(copy.deepcopy(network), self._batch, itertools.count())

    def __call__(
        self,
        tensors: dict[str, Tensor],
        x: Tensor,
        *,
        training: bool = False,
        valid: Tensor | None = None,
        keys: Tensor | None = None,
    ) -> Tensor:
        """Forward pass of [clients · slots, …] with tensors [clients, …], as `Layout.views` gives them."""
        batch = self._batch
        batch.num_clients = len(next(iter(tensors.values())))
        batch.valid, batch.keys = valid, keys
        if self._network.training != training:
            self._network.train(training)
        return torch.func.functional_call(self._network, tensors, (x,))


def _stacked(module: nn.Module, batch: Batch, numbers: Iterator[int]) -> nn.Module:
    for plain, layer in _LAYERS.items():
        if type(module) is plain:
            return layer(module, batch, next(numbers))
    own = [name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]
    if own:
        known = ", ".join(plain.__name__ for plain in _LAYERS)
        raise TypeError(
            f"{type(module).__name__} has tensors of its own ({', '.join(own)}); layers that stack: {known}"
        )
    for name, child in module.named_children():
        setattr(module, name, _stacked(child, batch, numbers))
    return module


class _Layer(nn.Module):
    """Holds the plain layer's tensors under the same names; a forward pass sees them with a clients' dimension."""

    weight: Tensor
    bias: Tensor | None
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, plain: nn.Module, batch: Batch, number: int) -> None:
        super().__init__()
        self.batch, self.number = batch, number
        for name, parameter in plain.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in plain.named_buffers(recurse=False):
            if buffer.is_floating_point():
                self.register_buffer(name, buffer)
        if "bias" not in self._parameters:
            self.bias = None


class _Conv2d(_Layer):
    def __init__(self, plain: nn.Conv2d, batch: Batch, number: int) -> None:
        super().__init__(plain, batch, number)
        if plain.padding_mode != "zeros":
            raise TypeError(f"Conv2d with padding_mode '{plain.padding_mode}' does not stack; use 'zeros'")
        self.groups = plain.groups
        self.geometry: dict[str, Any] = {"stride": plain.stride, "padding": plain.padding, "dilation": plain.dilation}

    def forward(self, x: Tensor) -> Tensor:
        n = self.batch.num_clients
        if n == 1 or not x.is_cuda:
            # On a CPU one client's batch already fills the convolution, and regrouping would only copy.
            biases = [None] * n if self.bias is None else self.bias
            parts = [
                F.conv2d(part, weight, bias, groups=self.groups, **self.geometry)
                for part, weight, bias in zip(x.chunk(n), self.weight, biases, strict=True)
            ]
            return parts[0] if n == 1 else torch.cat(parts)
        # [clients · slots, channels, …] → [slots, clients · channels, …]: one group of channels per client
        grouped = x.unflatten(0, (n, -1)).transpose(0, 1).flatten(1, 2)
        bias = None if self.bias is None else self.bias.flatten()
        y = F.conv2d(grouped, self.weight.flatten(0, 1), bias, groups=n * self.groups, **self.geometry)
        return y.unflatten(1, (n, -1)).transpose(0, 1).flatten(0, 1)


class _Linear(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        if self.batch.num_clients == 1:
            return F.linear(x, self.weight[0], None if self.bias is None else self.bias[0])
        x = x.unflatten(0, (self.batch.num_clients, -1))
        weight = self.weight.transpose(1, 2)
        y = torch.bmm(x, weight) if self.bias is None else torch.baddbmm(self.bias.unsqueeze(1), x, weight)
        return y.flatten(0, 1)


class _BatchNorm2d(_Layer):
    bias: Tensor

    def __init__(self, plain: nn.BatchNorm2d, batch: Batch, number: int) -> None:
        super().__init__(plain, batch, number)
        if plain.momentum is None or not plain.track_running_stats or not plain.affine:
            raise TypeError("BatchNorm2d stacks only with affine weights, running statistics and a fixed momentum")
        self.eps, self.momentum = plain.eps, plain.momentum

    def forward(self, x: Tensor) -> Tensor:
        n, valid = self.batch.num_clients, self.batch.valid
        alone = x.shape[0] * x.shape[2] * x.shape[3] == 1  # torch refuses statistics of one value
        if n == 1 and valid is None and not (self.training and alone):
            mean, var = self.running_mean[0], self.running_var[0]
            return F.batch_norm(x, mean, var, self.weight[0], self.bias[0], self.training, self.momentum, self.eps)
        x = x.unflatten(0, (n, -1))
        if self.training:
            mean, var = self._statistics(x, valid)
        else:
            mean, var = self.running_mean, self.running_var
        scale = self.weight * torch.rsqrt(var + self.eps)
        shift = self.bias - mean * scale
        y = torch.addcmul(shift[:, None, :, None, None], x, scale[:, None, :, None, None])
        return y.flatten(0, 1)

    def _statistics(self, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean and biased variance per client and channel over valid slots; moves the running statistics in place."""
        pixels = x.shape[3] * x.shape[4]
        if valid is None:
            weight = x.new_ones(())
            count = x.new_full((x.shape[0], 1), x.shape[1] * pixels)
        else:
            weight = valid.to(x.dtype)[:, :, None, None, None]
            count = valid.sum(1, keepdim=True).to(x.dtype) * pixels
        mean = (x * weight).sum((1, 3, 4)) / count
        var = ((x - mean[:, None, :, None, None]).square() * weight).sum((1, 3, 4)) / count
        with torch.no_grad():
            unbiased = var * count / (count - 1).clamp(min=1)
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(unbiased, self.momentum)
        return mean, var


class _Dropout(_Layer):
    def __init__(self, plain: nn.Dropout, batch: Batch, number: int) -> None:
        super().__init__(plain, batch, number)
        self.p = plain.p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0 or self.batch.keys is None:
            return x
        keys = streams.child_keys(self.batch.keys, self.number)
        keep = streams.uniform(keys, x.numel() // len(keys)).view_as(x) >= self.p
        return x * keep / (1 - self.p)


_LAYERS: dict[type[nn.Module], type[_Layer]] = {
    nn.Conv2d: _Conv2d,
    nn.Linear: _Linear,
    nn.BatchNorm2d: _BatchNorm2d,
    nn.Dropout: _Dropout,
}
