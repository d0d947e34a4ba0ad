"""Normalisation with the activation that follows it, in as few passes over memory as
possible on a GPU.

Activations are [samples, channels, 1, length]. The kernels take them channels-last, in
float32 or bfloat16, and compute in float32. Everything else goes to torch's own
functions.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hpcfed.kernels import cuda
from hpcfed.runtime import process_group

_VECTOR = 8
"""Channels per thread: it reads and writes them at once, 16 bytes of bfloat16."""
_MOST_THREADS = 256
"""The most threads of a block."""
_LEAST_WIDTH = 64
"""The fewest channels of a sample that a block takes, unless there are fewer."""
_MOST_CHANNELS = _VECTOR * _MOST_THREADS
"""The most channels that are summed together: a block has a thread for every vector."""
_POSITIONS = (0, 2, 3)
"""Dimensions of activations that batch norm sums over."""


@dataclass(frozen=True)
class Running:
    """Batch norm's statistics over batches, and the weight of a batch in them."""

    mean: Tensor
    var: Tensor
    momentum: float

    def count(self, mean: Tensor, var: Tensor, rows: int) -> None:
        """Include a batch with this mean and biased variance, over `rows` values."""
        if self.momentum:
            unbiased = var * (rows / max(1, rows - 1))
            self.mean.lerp_(mean.to(self.mean.dtype), self.momentum)
            self.var.lerp_(unbiased.to(self.var.dtype), self.momentum)


def batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running: Running,
    *,
    training: bool,
    eps: float,
    slope: float,
) -> Tensor:
    """Apply batch norm and leaky ReLU; in training, use the batch's own statistics and
    include them in the running ones.
    """
    if training and serves(x, x.shape[1]):
        y: Tensor = _LeakyBatchNorm.apply(
            x, weight.float(), bias.float(), running, eps, slope
        )
        return y
    numbers = (
        running.mean,
        running.var,
        cuda.aligned(weight.float()),
        cuda.aligned(bias.float()),
    )
    normal = F.batch_norm(
        x.float(), *numbers, training=training, momentum=running.momentum, eps=eps
    )
    return F.leaky_relu(normal, slope).to(x.dtype)


def shared_batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running: Running,
    *,
    eps: float,
    slope: float,
) -> Tensor:
    """Apply batch norm in training and leaky ReLU, over the samples of all ranks; each
    must have the same number.
    """
    normal: Tensor = _SharedBatchNorm.apply(
        x.float(), weight.float(), bias.float(), running, eps
    )
    return F.leaky_relu(normal, slope).to(x.dtype)


def group_norm(
    x: Tensor, groups: int, weight: Tensor, bias: Tensor, shift: Tensor, *, eps: float
) -> Tensor:
    """Apply group norm, a shift [samples, channels], and SiLU."""
    per = x.shape[1] // groups
    if serves(x, per):
        y: Tensor = _GroupNorm.apply(
            x, weight.float(), bias.float(), shift.float(), per, eps
        )
        return y
    normal = F.group_norm(
        x.float(), groups, cuda.aligned(weight.float()), cuda.aligned(bias.float()), eps
    )
    return F.silu(normal + shift.float()[:, :, None, None]).to(x.dtype)


class _LeakyBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        running: Running,
        eps: float,
        slope: float,
    ) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        rows = x.numel() // x.shape[1]
        ctx.slope = slope
        mean, square = _batch_sums(x, None, (), slope) / rows
        # In float64 from `_batch_sums`: the difference of two large float32 would lose
        # digits.
        var = (square - mean.square()).clamp_min(0)
        running.count(mean, var, rows)
        numbers = (mean.float(), (var + eps).rsqrt().float(), weight, bias)
        ctx.save_for_backward(x, *numbers)
        return _batch_apply(x, None, numbers, None, slope)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *numbers = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        sums = _batch_sums(x, dy, numbers, ctx.slope)
        means = (sums / (x.numel() // x.shape[1])).float()
        dx = _batch_apply(x, dy, numbers, means, ctx.slope)
        return dx, sums[1].float(), sums[0].float(), None, None, None


class _SharedBatchNorm(torch.autograd.Function):
    """One small collective each way. torch.nn.SyncBatchNorm would need GPUs, and a
    backend that gathers on them.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, running: Running, eps: float
    ) -> Tensor:
        own_var, own_mean = torch.var_mean(x, _POSITIONS, correction=0)
        everyones = x.new_zeros(process_group.size(), 2, x.shape[1])
        # An all-gather by an all-reduce of zeros, which every backend has.
        everyones[process_group.rank()] = torch.stack([own_mean, own_var])
        process_group.allreduce(everyones)
        means, variances = everyones.unbind(1)
        mean = means.mean(0)
        # The variance of all samples: the mean of the ranks' variances plus the
        # variance of their means, since each rank has equally many.
        var = variances.mean(0) + (means - mean).square().mean(0)
        ctx.rows = len(everyones) * (x.numel() // x.shape[1])
        running.count(mean, var, ctx.rows)
        weight, bias = cuda.aligned(weight), cuda.aligned(bias)
        ctx.save_for_backward(x, mean, (var + eps).rsqrt(), weight)
        return F.batch_norm(x, mean, var, weight, bias, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, weight = (
            t if t.ndim > 1 else t[:, None, None] for t in ctx.saved_tensors
        )
        hat = (x - mean) * rstd
        own = torch.stack([dy.sum(_POSITIONS), (dy * hat).sum(_POSITIONS)])
        everyones = own.clone()
        process_group.allreduce(everyones)
        mean_dy, mean_dy_hat = (everyones / ctx.rows)[:, :, None, None]
        dx = weight * rstd * (dy - mean_dy - hat * mean_dy_hat)
        # Gradients of weights are averaged over ranks later, with all others.
        return dx, own[1], own[0], None, None


def _batch_sums(x: Tensor, dy: Tensor | None, numbers: Any, slope: float) -> Tensor:
    """Return [2, channels] in float64: sums of x and x² or, with `dy`, of d and d x̂,
    where d is the gradient before the activation.
    """
    channels = x.shape[1]
    kernel = _batch_kernel(
        "batch_sums", channels, x.dtype, slope, dy is not None, x.device.index
    )
    parts = torch.empty(kernel.capacity, 2, channels, device=x.device)
    kernel(
        (kernel.capacity, 1),
        x,
        dy,
        *(numbers or [None] * 4),
        parts,
        x.numel() // channels,
    )
    return parts.sum(0, dtype=torch.float64)


def _batch_apply(
    x: Tensor, dy: Tensor | None, numbers: Any, means: Tensor | None, slope: float
) -> Tensor:
    channels = x.shape[1]
    kernel = _batch_kernel(
        "batch_apply", channels, x.dtype, slope, dy is not None, x.device.index
    )
    result = torch.empty_like(x)
    kernel(
        (4 * kernel.capacity, 1), x, dy, *numbers, means, result, x.numel() // channels
    )
    return result


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        shift: Tensor,
        per: int,
        eps: float,
    ) -> Tensor:
        x, shift = x.contiguous(memory_format=torch.channels_last), shift.contiguous()
        samples, channels = x.shape[:2]
        y = torch.empty_like(x)
        moments = torch.empty(samples, channels // per, 2, device=x.device)
        kernel = _group_kernel(
            "group_forward", channels, per, x.dtype, eps, x.device.index
        )
        kernel(
            (channels // block_width(per, channels), samples),
            x,
            weight,
            bias,
            shift,
            y,
            moments,
            x[0, 0].numel(),
        )
        ctx.save_for_backward(x, weight, bias, shift, moments)
        ctx.per, ctx.eps = per, eps
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, shift, moments = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        samples, channels = x.shape[:2]
        dx = torch.empty_like(x)
        d_shift, d_weight = torch.empty(2, samples, channels, device=x.device)
        kernel = _group_kernel(
            "group_backward", channels, ctx.per, x.dtype, ctx.eps, x.device.index
        )
        grid = (channels // block_width(ctx.per, channels), samples)
        length = x[0, 0].numel()
        kernel(grid, x, dy, weight, bias, shift, moments, dx, d_shift, d_weight, length)
        return dx, d_weight.sum(0), d_shift.sum(0), d_shift, None, None


def serves(x: Tensor, together: int) -> bool:
    """Return whether the kernels support sums of `together` neighbouring channels."""
    whole_vectors = together % _VECTOR == 0 and 0 < together <= _MOST_CHANNELS
    known_type = x.dtype in (torch.float32, torch.bfloat16)
    return whole_vectors and known_type and x.numel() > 0 and cuda.available(x.device)


def block_width(per: int, channels: int) -> int:
    """Return the channels of a block: whole groups of `per`, at least 64 channels if
    there are that many, and a divisor of the total.
    """
    groups = channels // per
    for together in range(1, groups):
        if groups % together == 0 and together * per >= _LEAST_WIDTH:
            return together * per
    # One group, or fewer than 64 channels in total.
    return channels


def block_threads(width: int) -> int:
    """Return the threads of a block: as many positions as fit, each with a thread for
    every vector of channels. If the width is not a power of two, a few threads are
    unused.
    """
    vectors = width // _VECTOR
    return _MOST_THREADS // vectors * vectors


@cache
def _batch_kernel(
    name: str,
    channels: int,
    dtype: torch.dtype,
    slope: float,
    backward: bool,
    device: int,
) -> cuda.Kernel:
    return cuda.Kernel(
        "norms.cu",
        name,
        batch_macros(channels, dtype, slope, backward),
        threads=block_threads(channels),
    )


def batch_macros(
    channels: int, dtype: torch.dtype, slope: float, backward: bool
) -> cuda.Macros:
    own = (
        ("BATCH", 1),
        ("WIDTH", channels),
        ("THREADS", block_threads(channels)),
        ("SLOPE", f"{float(slope)!r}f"),
        ("BACKWARD", int(backward)),
    )
    return (*own, ("BF16", int(dtype == torch.bfloat16)))


@cache
def _group_kernel(
    name: str, channels: int, per: int, dtype: torch.dtype, eps: float, device: int
) -> cuda.Kernel:
    macros = group_macros(channels, per, dtype, eps)
    threads = block_threads(block_width(per, channels))
    return cuda.Kernel("norms.cu", name, macros, threads=threads)


def group_macros(
    channels: int, per: int, dtype: torch.dtype, eps: float
) -> cuda.Macros:
    width = block_width(per, channels)
    own = (
        ("GROUP", 1),
        ("WIDTH", width),
        ("THREADS", block_threads(width)),
        ("CHANNELS", channels),
        ("PER", per),
        ("EPS", f"{float(eps)!r}f"),
    )
    return (*own, ("BF16", int(dtype == torch.bfloat16)))
