"""A network stacked over clients: one forward pass for many clients, each with its own
weights.

Clients are folded into the batch dimension, client by client: activations are [clients
· slots, …]. Everything that treats samples alike (activations, pooling, flatten,
residual sums) is then right as it stands, so any torch module made of the layers below
can be stacked; only layers with weights, batch norm and dropout must know whose sample
is whose. A stack of one client runs torch's own kernels, so a large network pays
nothing for being stackable.
"""

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcfed.kernels import convolution, cuda, dropout, linear
from hpcfed.runtime import randomness


@dataclass
class Batch:
    """What layers need to know of the batch that is passing through."""

    num_clients: int = 1
    valid: Tensor | None = None
    """[clients, slots], True where a slot holds a sample; None when all do."""
    keys: Tensor | None = None
    """[random layers, clients] keys of this step's random numbers; None outside of
    training.
    """
    sinks: dict[str, Tensor] = field(default_factory=dict)
    """Where gradients of named tensors belong. A layer may take its own out and write
    them there itself.
    """
    updates: dict[str, linear.Update] = field(default_factory=dict)
    """How named weights update themselves, those that do."""
    branch: cuda.Branch = field(default_factory=cuda.Branch)
    """For gradients that go to sinks."""


class StackedNetwork:
    """The network with its weighty layers exchanged for stacked ones."""

    def __init__(self, network: nn.Module, *, bf16: bool = False) -> None:
        self._bf16 = bf16
        self._batch = Batch()
        self._network = _stacked(
            copy.deepcopy(network), self._batch, "", itertools.count()
        )
        self.random_layers = sum(
            isinstance(module, _Dropout) for module in self._network.modules()
        )
        """Layers that draw random numbers in training."""
        self.masked = any(
            isinstance(module, _BatchNorm2d) for module in self._network.modules()
        )
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
        """Forward pass of [clients · slots, …] with tensors [clients, …], as
        `Layout.views` gives them.

        Gradients of a tensor may be written to its sink, in the shape of the tensor,
        instead of new memory; they are there after `join`. Weights named in `updates`
        update themselves in the backward pass and have no gradient.
        """
        batch = self._batch
        batch.num_clients = len(next(iter(tensors.values())))
        batch.valid, batch.keys, batch.sinks, batch.updates = (
            valid,
            keys,
            dict(sinks or {}),
            updates or {},
        )
        if self._network.training != training:
            self._network.train(training)
        with torch.autocast(
            x.device.type,
            torch.bfloat16,
            enabled=self._bf16 and x.is_cuda and batch.num_clients == 1,
        ):
            return torch.func.functional_call(self._network, tensors, (x,)).to(x.dtype)

    def updating(self, tensors: dict[str, Tensor], slots: int) -> list[str]:
        """Names of the weights that should update themselves in a step; never those of
        the first layer.
        """
        layers = [
            module
            for module in self._network.modules()
            if isinstance(module, _Conv2d | _Linear)
        ]
        names = [
            layer.name + "weight" for layer in layers[1:] if isinstance(layer, _Linear)
        ]
        several = len(next(iter(tensors.values()))) > 1
        return [
            name
            for name in names
            if several and linear.updates_itself(tensors[name], slots)
        ]

    def join(self) -> None:
        self._batch.branch.join()


def _stacked(
    module: nn.Module, batch: Batch, name: str, numbers: Iterator[int]
) -> nn.Module:
    for plain, layer in _LAYERS.items():
        if type(module) is plain:
            return layer(module, batch, name, numbers)
    own = [
        name
        for name, _ in (
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        )
    ]
    if own:
        known = ", ".join(plain.__name__ for plain in _LAYERS)
        raise TypeError(
            f"{type(module).__name__} has tensors of its own ({', '.join(own)}); "
            f"layers that stack: {known}"
        )
    for own_name, child in module.named_children():
        setattr(module, own_name, _stacked(child, batch, f"{name}{own_name}.", numbers))
    if isinstance(module, nn.Sequential):
        _join(module)
    return module


def _join(layers: nn.Sequential) -> None:
    """Lets a convolution do the activation and the pooling that follow it."""
    names = list(layers._modules)
    for i, name in enumerate(names):
        layer = layers._modules[name]
        if not isinstance(layer, _Conv2d):
            continue
        rest = [layers._modules[other] for other in names[i + 1 : i + 3]]
        if rest and isinstance(rest[0], nn.ReLU | nn.LeakyReLU):
            layer.slope = (
                rest[0].negative_slope if isinstance(rest[0], nn.LeakyReLU) else 0.0
            )
            setattr(layers, names[i + 1], nn.Identity())
            pool = rest[1] if len(rest) > 1 else None
            if (
                isinstance(pool, nn.MaxPool2d)
                and layer.slope >= 0
                and _is_plain_pool(pool)
            ):
                layer.pool = True
                setattr(layers, names[i + 2], nn.Identity())


def _is_plain_pool(pool: nn.MaxPool2d) -> bool:
    two = (2, (2, 2))
    usual = (
        pool.padding in (0, (0, 0))
        and pool.dilation in (1, (1, 1))
        and not pool.ceil_mode
    )
    return (
        pool.kernel_size in two
        and pool.stride in two
        and usual
        and not pool.return_indices
    )


class _Layer(nn.Module):
    """Holds the plain layer's tensors under the same names; a forward pass sees them
    with a clients' dimension.
    """

    weight: Tensor
    bias: Tensor | None
    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self, plain: nn.Module, batch: Batch, name: str, numbers: Iterator[int]
    ) -> None:
        """`numbers` are for layers that draw random numbers, in their order."""
        super().__init__()
        self.batch, self.name = batch, name
        for name, parameter in plain.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in plain.named_buffers(recurse=False):
            if buffer.is_floating_point():
                self.register_buffer(name, buffer)
        if "bias" not in self._parameters:
            self.bias = None

    def take_sinks(self) -> tuple[Tensor | None, Tensor | None]:
        """The sinks of weight and bias; a layer that is used again in the same pass
        finds none.
        """
        return tuple(
            self.batch.sinks.pop(self.name + own, None) for own in ("weight", "bias")
        )  # type: ignore[return-value]


class _Conv2d(_Layer):
    slope = 1.0
    """Of the activation below zero, which this layer applies: 1 for none."""
    pool = False
    """Whether this layer ends with max pooling of 2 × 2 pixels."""

    def __init__(
        self, plain: nn.Conv2d, batch: Batch, name: str, numbers: Iterator[int]
    ) -> None:
        super().__init__(plain, batch, name, numbers)
        if plain.padding_mode != "zeros":
            raise TypeError(
                f"Conv2d with padding_mode '{plain.padding_mode}' does not stack; use 'zeros'"
            )
        self.groups = plain.groups
        self.geometry: dict[str, Any] = {
            "stride": plain.stride,
            "padding": plain.padding,
            "dilation": plain.dilation,
        }
        kernel, padding = set(plain.kernel_size), set(plain.padding)
        self.square = (
            len(kernel) == len(padding) == 1
            and not isinstance(plain.padding, str)
            and plain.groups == 1
        )
        self.square &= set(plain.stride) == set(plain.dilation) == {1}

    def forward(self, x: Tensor) -> Tensor:
        layer = self._layer(x)
        if layer is not None:
            return convolution.block(
                x, self.weight, self.bias, layer, self._sink(layer), self.batch.branch
            )
        y = self._convolved(x)
        if self.slope != 1:
            y = F.relu(y) if self.slope == 0 else F.leaky_relu(y, self.slope)
        return F.max_pool2d(y, 2) if self.pool else y

    def _layer(self, x: Tensor) -> convolution.Layer | None:
        """What our own kernels need to know, where they serve: several clients on a
        GPU, in TensorFloat-32.
        """
        clients = self.batch.num_clients
        if (
            clients == 1
            or x.dtype != torch.float32
            or not self.square
            or not cuda.available(x.device)
        ):
            return None
        if not torch.backends.cudnn.allow_tf32 or self.weight.stride(2) != 1:
            return None
        layer = convolution.Layer(
            height=x.shape[2],
            width=x.shape[3],
            channels=x.shape[1],
            outputs=self.weight.shape[1],
            kernel=self.weight.shape[-1],
            padding=self.geometry["padding"][0],
            bias=self.bias is not None,
            slope=self.slope,
            pool=self.pool,
        )
        return (
            layer
            if layer.supported(convolution.shared_memory(x.device.index))
            else None
        )

    def _sink(self, layer: convolution.Layer) -> Tensor | None:
        """Weight and bias as one, where they are neighbours."""
        weight, bias = self.take_sinks()
        if weight is None or (self.bias is not None and bias is None):
            return None
        end = weight.storage_offset() + weight[0].numel()
        if bias is not None and bias.storage_offset() != end:
            return None
        return weight.as_strided((len(weight), layer.columns), (weight.stride(0), 1))

    def _convolved(self, x: Tensor) -> Tensor:
        n = self.batch.num_clients
        if n == 1 or not x.is_cuda:
            # On a CPU one client's batch already fills the convolution, and regrouping
            # would only copy.
            biases = [None] * n if self.bias is None else self.bias
            parts = [
                F.conv2d(part, weight, bias, groups=self.groups, **self.geometry)
                for part, weight, bias in zip(
                    x.chunk(n), self.weight, biases, strict=True
                )
            ]
            return parts[0] if n == 1 else torch.cat(parts)
        # [clients · slots, channels, …] → [slots, clients · channels, …]: one group of
        # channels per client
        grouped = x.unflatten(0, (n, -1)).transpose(0, 1).flatten(1, 2)
        bias = None if self.bias is None else self.bias.flatten()
        y = F.conv2d(
            grouped,
            self.weight.flatten(0, 1),
            bias,
            groups=n * self.groups,
            **self.geometry,
        )
        return y.unflatten(1, (n, -1)).transpose(0, 1).flatten(0, 1)


class _Linear(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        if self.batch.num_clients == 1:
            return F.linear(
                x, self.weight[0], None if self.bias is None else self.bias[0]
            )
        x = x.unflatten(0, (self.batch.num_clients, -1))
        update = self.batch.updates.get(self.name + "weight")
        y = linear.linear(
            x,
            self.weight,
            self.bias,
            sinks=self.take_sinks(),
            update=update,
            branch=self.batch.branch,
        )
        return y.flatten(0, 1)


class _BatchNorm2d(_Layer):
    bias: Tensor

    def __init__(
        self, plain: nn.BatchNorm2d, batch: Batch, name: str, numbers: Iterator[int]
    ) -> None:
        super().__init__(plain, batch, name, numbers)
        if plain.momentum is None or not plain.track_running_stats or not plain.affine:
            raise TypeError(
                "BatchNorm2d stacks only with affine weights, running statistics and a "
                "fixed momentum"
            )
        self.eps, self.momentum = plain.eps, plain.momentum

    def forward(self, x: Tensor) -> Tensor:
        n, valid = self.batch.num_clients, self.batch.valid
        alone = (
            x.shape[0] * x.shape[2] * x.shape[3] == 1
        )  # torch refuses statistics of one value
        if n == 1 and valid is None and not (self.training and alone):
            mean, var = self.running_mean[0], self.running_var[0]
            return F.batch_norm(
                x,
                mean,
                var,
                self.weight[0],
                self.bias[0],
                self.training,
                self.momentum,
                self.eps,
            )
        x = x.unflatten(0, (n, -1))
        if self.training:
            mean, var = self._statistics(x, valid)
        else:
            mean, var = self.running_mean, self.running_var
        scale = self.weight * torch.rsqrt(var + self.eps)
        shift = self.bias - mean * scale
        y = torch.addcmul(
            shift[:, None, :, None, None], x, scale[:, None, :, None, None]
        )
        return y.flatten(0, 1)

    def _statistics(self, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean and biased variance per client and channel over valid slots; moves the
        running statistics in place.
        """
        pixels = x.shape[3] * x.shape[4]
        if valid is None:
            weight = x.new_ones(())
            count = x.new_full((x.shape[0], 1), x.shape[1] * pixels)
        else:
            weight = valid.to(x.dtype)[:, :, None, None, None]
            count = valid.sum(1, keepdim=True).to(x.dtype) * pixels
        mean = (x * weight).sum((1, 3, 4)) / count
        var = ((x - mean[:, None, :, None, None]).square() * weight).sum(
            (1, 3, 4)
        ) / count
        with torch.no_grad():
            unbiased = var * count / (count - 1).clamp(min=1)
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(unbiased, self.momentum)
        return mean, var


class _Dropout(_Layer):
    def __init__(
        self, plain: nn.Dropout, batch: Batch, name: str, numbers: Iterator[int]
    ) -> None:
        super().__init__(plain, batch, name, numbers)
        self.p, self.number = plain.p, next(numbers)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0 or self.batch.keys is None:
            return x
        keys = self.batch.keys[self.number]
        if cuda.available(x.device) and x.dtype == torch.float32:
            return dropout.dropout(x, keys, self.p)
        keep = randomness.uniform(keys, x.numel() // len(keys)).view_as(x) >= self.p
        return x * keep / (1 - self.p)


_LAYERS: dict[type[nn.Module], type[_Layer]] = {
    nn.Conv2d: _Conv2d,
    nn.Linear: _Linear,
    nn.BatchNorm2d: _BatchNorm2d,
    nn.Dropout: _Dropout,
}
