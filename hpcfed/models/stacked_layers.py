"""Layers that know whose sample is whose, in a network stacked over clients."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcfed.kernels import (
    batch_norm,
    convolution,
    cpu_convolution,
    cpu_dropout,
    cuda,
    dropout,
    linear,
)
from hpcfed.runtime import randomness


@dataclass
class Batch:
    """What layers need to know of the batch that is passing through."""

    num_clients: int = 1
    slots: int = 1
    """Samples of a client, where clients are folded into the batch."""
    valid: Tensor | None = None
    """[clients, slots], True where a slot holds a sample; None when all do."""
    keys: Tensor | None = None
    """[random layers, clients]: keys of this step's random numbers; None outside of
    training.
    """
    sinks: dict[str, Tensor] = field(default_factory=dict)
    """Where gradients of named tensors belong. A layer may take its own out and write
    there itself.
    """
    updates: dict[str, linear.Update] = field(default_factory=dict)
    """How the weights that update themselves do so, by name."""
    bounded: bool = False
    """Whether gradients of the outputs are at most 1."""
    branch: cuda.Branch = field(default_factory=cuda.Branch)
    """Where gradients that go to sinks are computed."""
    contiguous: bool = False
    """Whether images are never channels-last, for modules that take them by Tensor.view."""


class StackedLayer(nn.Module):
    """Holds the plain layer's tensors under the same names.

    A forward pass sees them with a clients' dimension.
    """

    weight: Tensor
    bias: Tensor | None
    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self, plain: nn.Module, batch: Batch, name: str, numbers: Iterator[int]
    ) -> None:
        """`numbers` count the layers that draw random numbers."""
        super().__init__()
        self.batch = batch
        self.name = name
        for tensor_name, parameter in plain.named_parameters(recurse=False):
            self.register_parameter(tensor_name, parameter)
        for tensor_name, buffer in plain.named_buffers(recurse=False):
            if buffer.is_floating_point():
                self.register_buffer(tensor_name, buffer)
        # `bias=False` leaves a None among the parameters, which is not named.
        if "bias" not in self._parameters:
            self.bias = None
        # Not a submodule: its tensors are not the network's any more. Last, because
        # tensors are registered only under names that mean nothing yet.
        object.__setattr__(self, "replaced", plain)

    def __getattr__(self, name: str) -> Any:
        """Find what a module may ask of its layer, such as a dropout's p."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "replaced" not in self.__dict__:  # while it is being made or copied
                raise
            return getattr(self.replaced, name)

    def take_sinks(self) -> tuple[Tensor | None, Tensor | None]:
        """Take out the sinks of weight and bias.

        A layer that is used again in the same pass finds none: its gradients add up,
        which sinks cannot do.
        """
        sinks = self.batch.sinks
        weight = sinks.pop(self.name + "weight", None)
        bias = sinks.pop(self.name + "bias", None)
        return weight, bias

    def by_client(self, x: Tensor) -> Any:
        """Pass [clients, …] forward, where clients are not folded into the batch."""
        if x.dim() == 2:
            return self(x)
        return self(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class StackedConv2d(StackedLayer):
    slope = 1.0
    """Slope below zero of the activation that this layer applies; 1: none."""
    pool = False
    """Whether this layer ends with max pooling of 2 × 2 pixels."""

    def __init__(
        self, plain: nn.Conv2d, batch: Batch, name: str, numbers: Iterator[int]
    ) -> None:
        super().__init__(plain, batch, name, numbers)
        if plain.padding_mode != "zeros":
            raise TypeError(
                f"Conv2d with padding_mode '{plain.padding_mode}' does not stack; use "
                "'zeros'"
            )
        self.groups = plain.groups
        self.geometry: dict[str, Any] = {
            "stride": plain.stride,
            "padding": plain.padding,
            "dilation": plain.dilation,
        }
        self.square = (
            plain.groups == 1
            and not isinstance(plain.padding, str)
            and len(set(plain.kernel_size)) == 1
            and len(set(plain.padding)) == 1
            and set(plain.stride) == {1}
            and set(plain.dilation) == {1}
        )
        """Whether our kernels know this geometry."""

    def forward(self, x: Tensor) -> Tensor:
        y = self._by_kernel(x)
        if y is None:
            y = self._by_torch(x)
        return y.contiguous() if self.batch.contiguous else y

    def _by_kernel(self, x: Tensor) -> Tensor | None:
        """Return channels-last images; None where no kernel of ours serves."""
        layer = self._kernel_layer(x)
        if layer is not None:
            sink = self._sink(layer)
            branch = self.batch.branch
            return convolution.block(
                x,
                self.weight,
                self.bias,
                layer,
                sink,
                branch,
                bounded=self.batch.bounded,
            )
        on_cpu = self._cpu_layer(x)
        if on_cpu is not None:
            sinks = self.take_sinks()
            return cpu_convolution.block(x, self.weight, self.bias, on_cpu, sinks)
        return None

    def _by_torch(self, x: Tensor) -> Tensor:
        y = self._convolved(x)
        if self.slope == 0:
            y = F.relu(y)
        elif self.slope != 1:
            y = F.leaky_relu(y, self.slope)
        return F.max_pool2d(y, 2) if self.pool else y

    def may_use_kernel(self, like: Tensor) -> bool:
        """Tell whether our kernels serve such numbers, for images that are not too
        large.
        """
        # A user who forbids TensorFloat-32 gets torch's convolutions.
        return (
            self.square
            and self.replaced.out_channels % 8 == 0
            and like.dtype == torch.float32
            and cuda.available(like.device)
            and torch.backends.cudnn.allow_tf32
        )

    def _kernel_layer(self, x: Tensor) -> convolution.Layer | None:
        """Return what our kernels need to know, where they serve.

        They serve several clients on a GPU, in TensorFloat-32, channels-last.
        """
        if self.batch.num_clients == 1 or not self.may_use_kernel(x):
            return None
        if self.weight.stride(2) != 1:
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
        shared = convolution.shared_memory(x.device.index)
        return layer if layer.supported(shared) else None

    def _sink(self, layer: convolution.Layer) -> Tensor | None:
        """Return the sinks of weight and bias as one, where they are neighbours.

        The kernel writes both gradients as one matrix.
        """
        weight, bias = self.take_sinks()
        if weight is None or (self.bias is not None and bias is None):
            return None
        # The layout puts a bias right behind its weight, unless padding lies between.
        end = weight.storage_offset() + weight[0].numel()
        if bias is not None and bias.storage_offset() != end:
            return None
        shape = (len(weight), layer.columns)
        return weight.as_strided(shape, (weight.stride(0), 1))

    def _cpu_layer(self, x: Tensor) -> cpu_convolution.Layer | None:
        """Return what our CPU kernel needs to know, where it serves several clients."""
        if self.batch.num_clients == 1 or not self.square:
            return None
        layer = cpu_convolution.Layer(
            kernel=self.weight.shape[-1],
            padding=self.geometry["padding"][0],
            slope=self.slope,
            pool=self.pool,
        )
        return layer if cpu_convolution.serves(x, layer) else None

    def _convolved(self, x: Tensor) -> Tensor:
        if self.batch.num_clients == 1 or not x.is_cuda:
            return self._convolved_one_by_one(x)
        # [clients · slots, channels, …] → [slots, clients · channels, …]: one group of
        # channels per client
        n = self.batch.num_clients
        by_client = x.unflatten(0, (n, -1))
        grouped = by_client.transpose(0, 1).flatten(1, 2)
        y = F.conv2d(
            grouped,
            self.weight.flatten(0, 1),
            None if self.bias is None else self.bias.flatten(),
            groups=n * self.groups,
            **self.geometry,
        )
        # And back.
        by_slot = y.unflatten(1, (n, -1))
        return by_slot.transpose(0, 1).flatten(0, 1)

    def _convolved_one_by_one(self, x: Tensor) -> Tensor:
        n = self.batch.num_clients
        if n == 1:
            # Squeezed rather than indexed: the gradient of an index is a copy.
            weight = self.weight.squeeze(0)
            bias = None if self.bias is None else self.bias.squeeze(0)
            return F.conv2d(x, weight, bias, groups=self.groups, **self.geometry)
        # On a CPU one client's batch already fills the convolution, and regrouping
        # would only copy.
        biases = [None] * n if self.bias is None else self.bias
        convolved = []
        clients = zip(x.chunk(n), self.weight, biases, strict=True)
        for client_x, weight, bias in clients:
            y = F.conv2d(client_x, weight, bias, groups=self.groups, **self.geometry)
            convolved.append(y)
        return torch.cat(convolved)


class StackedConv1d(StackedLayer):
    def __init__(
        self, plain: nn.Conv1d, batch: Batch, name: str, numbers: Iterator[int]
    ) -> None:
        super().__init__(plain, batch, name, numbers)
        if plain.padding_mode != "zeros":
            raise TypeError(
                f"Conv1d with padding_mode '{plain.padding_mode}' does not stack; use "
                "'zeros'"
            )
        self.groups = plain.groups
        self.geometry: dict[str, Any] = {
            "stride": plain.stride,
            "padding": plain.padding,
            "dilation": plain.dilation,
        }

    def forward(self, x: Tensor) -> Tensor:
        n = self.batch.num_clients
        # As in StackedConv2d: a group of channels per client.
        grouped = x.unflatten(0, (n, -1)).transpose(0, 1).flatten(1, 2)
        y = F.conv1d(
            grouped,
            self.weight.flatten(0, 1),
            None if self.bias is None else self.bias.flatten(),
            groups=n * self.groups,
            **self.geometry,
        )
        return y.unflatten(1, (n, -1)).transpose(0, 1).flatten(0, 1)


class StackedLinear(StackedLayer):
    def forward(self, x: Tensor) -> Tensor:
        # torch's own product for one client, without the clients' dimension.
        if self.batch.num_clients == 1:
            bias = None if self.bias is None else self.bias.squeeze(0)
            return F.linear(x, self.weight.squeeze(0), bias)
        # Positions in a sequence are samples like any other.
        y = linear.linear(
            x.reshape(self.batch.num_clients, -1, x.shape[-1]),
            self.weight,
            self.bias,
            sinks=self.take_sinks(),
            update=self.batch.updates.get(self.name + "weight"),
            branch=self.batch.branch,
        )
        return y.view(*x.shape[:-1], -1)


class StackedBatchNorm2d(StackedLayer):
    bias: Tensor
    slope = 1.0
    """Slope below zero of the activation that this layer applies; 1: none."""

    def __init__(
        self, plain: nn.BatchNorm2d, batch: Batch, name: str, numbers: Iterator[int]
    ) -> None:
        super().__init__(plain, batch, name, numbers)
        if plain.momentum is None or not plain.track_running_stats or not plain.affine:
            raise TypeError(
                "BatchNorm2d stacks only with affine weights, running statistics and a "
                "fixed momentum"
            )
        self.eps = plain.eps
        self.momentum = plain.momentum

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Pass forward; the residual is added before the activation."""
        alone = self.batch.num_clients == 1 and self.batch.valid is None
        if alone and self.training and batch_norm.serves(x, residual):
            return self._fused(x, residual)
        y = self._normalised(x)
        if residual is not None:
            y = y + residual
        if self.slope == 0:
            return F.relu(y)
        return y if self.slope == 1 else F.leaky_relu(y, self.slope)

    def _fused(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Let our own kernels do all of it for one client."""
        weight, bias = self.take_sinks()
        return batch_norm.batch_norm(
            x,
            self.weight.squeeze(0),
            self.bias.squeeze(0),
            (self.running_mean.squeeze(0), self.running_var.squeeze(0)),
            batch_norm.Norm(self.eps, self.momentum, self.slope),
            residual=residual,
            sinks=(
                None if weight is None else weight.squeeze(0),
                None if bias is None else bias.squeeze(0),
            ),
        )

    def _normalised(self, x: Tensor) -> Tensor:
        n = self.batch.num_clients
        valid = self.batch.valid
        # torch refuses batch statistics of a single value.
        samples, _, height, width = x.shape
        values = samples * height * width
        refused = self.training and values == 1
        if n == 1 and valid is None and not refused:
            return self._plain(x)
        x = x.unflatten(0, (n, -1))
        mean = self.running_mean
        var = self.running_var
        if self.training:
            mean, var = self._statistics(x, valid)
        # One fused multiply-add per value: (x − mean) · w / σ + b = x · scale + shift
        scale = self.weight * torch.rsqrt(var + self.eps)
        shift = self.bias - mean * scale
        scale = scale[:, None, :, None, None]
        shift = shift[:, None, :, None, None]
        y = torch.addcmul(shift, x, scale)
        return y.flatten(0, 1)

    def _plain(self, x: Tensor) -> Tensor:
        return F.batch_norm(
            x,
            self.running_mean.squeeze(0),
            self.running_var.squeeze(0),
            self.weight.squeeze(0),
            self.bias.squeeze(0),
            self.training,
            self.momentum,
            self.eps,
        )

    def _statistics(self, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return mean and biased variance per client and channel over valid slots.

        Updates the running statistics in place, with the unbiased variance as torch
        does.
        """
        pixels = x.shape[3] * x.shape[4]
        if valid is None:
            weight = x.new_ones(())
            clients, slots = x.shape[:2]
            count = x.new_full((clients, 1), slots * pixels)
        else:
            weight = valid.to(x.dtype)[:, :, None, None, None]
            count = valid.sum(1, keepdim=True).to(x.dtype) * pixels
        # Two passes, mean first: a sum of squares would lose digits in float32.
        mean = (x * weight).sum((1, 3, 4)) / count
        squares = (x - mean[:, None, :, None, None]).square()
        var = (squares * weight).sum((1, 3, 4)) / count
        with torch.no_grad():
            # At least 1: a client with a single value has no unbiased variance.
            unbiased = var * count / (count - 1).clamp(min=1)
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(unbiased, self.momentum)
        return mean, var


class StackedBatchNorm1d(StackedBatchNorm2d):
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Pass [samples, channels] or [samples, channels, length] forward."""
        assert residual is None, "residual sums are those of images"
        image = x.reshape(*x.shape[:2], -1, 1)
        return super().forward(image).view_as(x)


class StackedDropout(StackedLayer):
    flat = False
    """Whether this layer ends with images as vectors."""

    def __init__(
        self, plain: nn.Dropout, batch: Batch, name: str, numbers: Iterator[int]
    ) -> None:
        super().__init__(plain, batch, name, numbers)
        self.p = plain.p
        # By number: two layers of a client must not drop alike.
        self.number = next(numbers)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0 or self.batch.keys is None:
            return x.flatten(1) if self.flat else x
        return dropped(x, self.batch.keys[self.number], self.p, flat=self.flat)


def dropped(x: Tensor, keys: Tensor, p: float, *, flat: bool = False) -> Tensor:
    """Drop values of [clients · …] by each client's key; `flat`: images become vectors."""
    if p == 1:
        # Nothing is left that could be scaled by 1 / (1 − p).
        nothing = x * 0
        return nothing.flatten(1) if flat else nothing
    if cuda.available(x.device) and x.dtype == torch.float32:
        return dropout.dropout(x, keys, p, flat=flat)
    if cpu_dropout.serves(x):
        y = cpu_dropout.dropout(x, keys, p)
        return y.flatten(1) if flat else y
    # The same numbers as the kernels draw, so CPU and GPU drop the same values.
    per_client = x.numel() // len(keys)
    drawn = randomness.uniform(keys, per_client).view_as(x)
    y = x * (drawn >= p) / (1 - p)
    return y.flatten(1) if flat else y
