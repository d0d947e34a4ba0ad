"""Layers that know which sample belongs to which client, in a stacked network."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcfed.kernels import batch_norm, cuda, dropout, few_samples, linear
from hpcfed.kernels.adapted import AdapterMemory, Parts, adapted, padded
from hpcfed.models.lora import LoraLinear
from hpcfed.models.stacked_layer import Batch, StackedLayer
from hpcfed.runtime import randomness


class StackedLinear(StackedLayer):
    slope = 1.0
    """Slope below zero of the activation that this layer applies; 1: none."""

    def forward(self, x: Tensor) -> Tensor:
        # One client uses torch's own product, without the clients' dimension.
        if self.batch.num_clients == 1:
            bias = None if self.bias is None else self.bias.squeeze(0)
            y = F.linear(x, self.weight.squeeze(0), bias)
            return linear.activated(y, self.slope)
        # Positions in a sequence are samples like any other.
        y = linear.linear(
            x.reshape(self.batch.num_clients, -1, x.shape[-1]),
            self.weight,
            self.bias,
            sinks=self.take_sinks(),
            update=self.batch.updates.get(self.name + "weight"),
            branch=self.batch.branch,
            slope=self.slope,
            widest=self.batch.widest,
        )
        return y.view(*x.shape[:-1], -1)

    def kernel_sources(
        self, slots: int, *, first: bool
    ) -> Iterator[tuple[str, cuda.Macros]]:
        """Yield the sources of what trains several clients with few samples each; the
        first layer of a network needs no gradient of its inputs.
        """
        outputs, inputs = self.weight.shape
        if not few_samples.fits(slots, outputs, inputs):
            return
        # One that updates itself has kernels of its own.
        if first or outputs * inputs < linear.MANY_WEIGHTS:
            biased = self.bias is not None
            shape = (slots, outputs, inputs, self.slope)
            yield from few_samples.sources(*shape, biased=biased, first=first)


class StackedLora(LoraLinear):
    """A frozen linear layer of all clients, and each client's own adapter."""

    base: nn.Module
    padding = 0
    """Further outputs that a language model's head has, see `quick`."""
    down: StackedLinear  # type: ignore[assignment]
    up: StackedLinear  # type: ignore[assignment]

    def __init__(self, plain: LoraLinear) -> None:
        """Take over the layers of one whose adapter is stacked."""
        nn.Module.__init__(self)
        for name, layer in plain.named_children():
            self.add_module(name, layer)
        self.scale = plain.scale

    def forward(self, x: Tensor) -> Tensor:
        y = adapted(self.by_client(x), *self.parts())
        return y.view(*x.shape[:-1], -1)

    def by_client(self, x: Tensor) -> Tensor:
        """Return samples as [clients, …, inputs], with a single dimension between."""
        return x.reshape(self.down.batch.num_clients, -1, x.shape[-1])

    def parts(self) -> Parts:
        """Return what this pass multiplies with; it may be asked once in a pass."""
        weight: Tensor = self.base.weight  # type: ignore[assignment]
        # Hugging Face's Conv1D stores its weight as [inputs, outputs].
        if not isinstance(self.base, nn.Linear):
            weight = weight.mT
        weight, bias = padded(weight, self.base.bias, self.padding)  # type: ignore[arg-type]
        up, half, sink = self.up.weight, self.up.in_halves, self.up.take_sinks()[0]
        if self.padding:
            # AdapterMemory of the padded factor is nobody's.
            up, half, sink = F.pad(up, (0, 0, 0, self.padding)), None, None
        halves = (self.down.in_halves, half)
        sinks = (self.down.take_sinks()[0], sink)
        memory = AdapterMemory(halves, sinks, self.down.batch.branch)
        return Parts(weight, bias, self.down.weight, up, self.scale, memory)


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
        return linear.activated(y, self.slope)

    def _fused(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Let our own kernels do everything for one client."""
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
        # torch refuses to compute batch statistics of a single value.
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

        Update the running statistics in place, with the unbiased variance as in torch.
        """
        pixels = x.shape[3] * x.shape[4]
        if valid is None:
            weight = x.new_ones(())
            clients, slots = x.shape[:2]
            count = x.new_full((clients, 1), slots * pixels)
        else:
            weight = valid.to(x.dtype)[:, :, None, None, None]
            # 0 for clients that only pad the stack: their NaN stays in their own rows,
            # which do not mix with others.
            count = valid.sum(1, keepdim=True).to(x.dtype) * pixels
        # Two passes, mean first: a sum of squares would lose digits in float32.
        mean = (x * weight).sum((1, 3, 4)) / count
        squares = (x - mean[:, None, :, None, None]).square()
        var = (squares * weight).sum((1, 3, 4)) / count
        with torch.no_grad():
            # At least 1: a client with a single value has no unbiased variance.
            unbiased = var * count / (count - 1).clamp(min=1)
            # By `data`, which has a version of its own: all layers' statistics share
            # memory, and torch's norm of another layer refuses memory that has changed.
            self.running_mean.data.lerp_(mean, self.momentum)
            self.running_var.data.lerp_(unbiased, self.momentum)
        return mean, var


class StackedBatchNorm1d(StackedBatchNorm2d):
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Pass [samples, channels] or [samples, channels, length] forward."""
        assert residual is None, "residual sums are those of images"
        image = x.reshape(*x.shape[:2], -1, 1)
        return super().forward(image).view_as(x)


class StackedDropout(StackedLayer):
    flat = False
    """Whether this layer also flattens images to vectors."""

    def __init__(
        self, plain: nn.Dropout, batch: Batch, name: str, numbers: Iterator[int]
    ) -> None:
        super().__init__(plain, batch, name, numbers)
        self.p = plain.p
        # A number per layer: two layers of a client must not drop the same values.
        self.number = next(numbers)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0 or self.batch.keys is None:
            return x.flatten(1) if self.flat else x
        return dropped(x, self.batch.keys[self.number], self.p, flat=self.flat)


def dropped(x: Tensor, keys: Tensor, p: float, *, flat: bool = False) -> Tensor:
    """Drop values of [clients · …] by each client's key; `flat`: flatten images."""
    if p == 1:
        # Everything is dropped, and 1 / (1 − p) would be infinite.
        nothing = x * 0
        return nothing.flatten(1) if flat else nothing
    if dropout.serves(x):
        return dropout.dropout(x, keys, p, flat=flat)
    # The same numbers as in the kernels, so CPU and GPU drop the same values.
    per_client = x.numel() // len(keys)
    drawn = randomness.uniform(keys, per_client).view_as(x)
    y = x * (drawn >= p) / (1 - p)
    return y.flatten(1) if flat else y


# Norms and embeddings that know which sample belongs to which client.
#
# The normalisation itself treats samples alike: torch's own kernel does it for all
# clients at once, without weights. Each client's weight and bias are applied afterwards.


class StackedNorm(StackedLayer):
    """What norms have in common: each client's weight and bias, if any."""

    def _scaled(self, y: Tensor, *, channels: int) -> Tensor:
        """Return y · weight + bias, whose dimensions end `channels` before y's."""
        weight = self._parameters.get("weight")
        if weight is None:
            return y
        by_client = y.unflatten(0, (self.batch.num_clients, -1))
        # [clients, 1, …, *weight's shape, 1, …]
        shape = weight.shape[1:]
        ones = by_client.dim() - 1 - len(shape) - channels
        view = (len(weight), *[1] * ones, *shape, *[1] * channels)
        if self.bias is None:
            return (by_client * weight.view(view)).flatten(0, 1)
        scaled = torch.addcmul(self.bias.view(view), by_client, weight.view(view))
        return scaled.flatten(0, 1)


class StackedLayerNorm(StackedNorm):
    def __init__(
        self, plain: nn.LayerNorm, batch: Batch, name: str, numbers: Iterator[int]
    ) -> None:
        super().__init__(plain, batch, name, numbers)
        self.shape = tuple(plain.normalized_shape)
        self.eps = plain.eps

    def forward(self, x: Tensor) -> Tensor:
        return self._scaled(F.layer_norm(x, self.shape, eps=self.eps), channels=0)


class StackedRMSNorm(StackedNorm):
    def __init__(
        self, plain: nn.RMSNorm, batch: Batch, name: str, numbers: Iterator[int]
    ) -> None:
        super().__init__(plain, batch, name, numbers)
        self.shape = tuple(plain.normalized_shape)
        self.eps = plain.eps

    def forward(self, x: Tensor) -> Tensor:
        return self._scaled(F.rms_norm(x, self.shape, eps=self.eps), channels=0)


class StackedGroupNorm(StackedNorm):
    def __init__(
        self, plain: nn.GroupNorm, batch: Batch, name: str, numbers: Iterator[int]
    ) -> None:
        super().__init__(plain, batch, name, numbers)
        self.groups = plain.num_groups
        self.eps = plain.eps

    def forward(self, x: Tensor) -> Tensor:
        y = F.group_norm(x, self.groups, eps=self.eps)
        return self._scaled(y, channels=x.dim() - 2)


class StackedEmbedding(StackedLayer):
    def __init__(
        self, plain: nn.Embedding, batch: Batch, name: str, numbers: Iterator[int]
    ) -> None:
        super().__init__(plain, batch, name, numbers)
        if plain.max_norm is not None or plain.sparse or plain.scale_grad_by_freq:
            raise TypeError(
                "Embedding stacks only without max_norm, sparse and scale_grad_by_freq"
            )
        # This row gets no gradient.
        self.padding = plain.padding_idx

    def forward(self, x: Tensor) -> Tensor:
        clients, slots = self.batch.num_clients, self.batch.slots
        if len(x) == 1 and clients > 1:
            # The same input for all samples, such as positions: once per client.
            found = self._looked_up(x.expand(clients, *x.shape[1:]))
            each = found.unsqueeze(1).expand(clients, slots, *found.shape[1:])
            return each.flatten(0, 1)
        return self._looked_up(x)

    def _looked_up(self, x: Tensor) -> Tensor:
        clients = self.batch.num_clients
        numbers = torch.arange(clients, device=x.device)
        # The tables of all clients are stacked into one table.
        first_row = numbers * self.weight.shape[1]
        by_client = x.unflatten(0, (clients, -1))
        shape = (clients, *[1] * (by_client.dim() - 1))
        rows = (by_client + first_row.view(shape)).flatten(0, 1)
        table = self.weight.flatten(0, 1)
        if self.padding is None:
            return F.embedding(rows, table)
        found = F.embedding(rows, table)
        is_padding = (x == self.padding).unsqueeze(-1)
        return torch.where(is_padding, found.detach(), found)
