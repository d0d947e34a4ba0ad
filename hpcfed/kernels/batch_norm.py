"""Batch norm in training, with the residual sum and the activation that follow it, in
two passes over memory each way.

torch's own operations take five passes forward and eight backward, and as many
launches. Activations are [samples, channels, height, width], channels-last, in float32
or bfloat16; the kernels compute in float32. Other cases are left to the caller.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpcfed.kernels import cuda

VECTOR = 8
"""Channels per thread: it reads and writes them at once."""
WIDEST = 64
"""The most channels per block: 128 bytes of bfloat16, one cache line."""
WHOLE_WIDEST = 16
"""The most channels of a block with all rows: 32 bytes, the least memory transaction."""
WHOLE_ROWS = 16384
"""Up to this many rows, one block takes all of them, in one kernel."""
THREADS = 512
SUMMING = 64
"""Blocks that sum. Each applying block reads a part from all of them: with more, that
takes longer than the sums."""
APPLYING = 132
"""The most blocks that apply: one for each multiprocessor of an H200."""


@dataclass(frozen=True)
class Norm:
    """The constants of a batch norm and of the activation after it."""

    eps: float
    momentum: float
    """The weight of a batch in the running statistics."""
    slope: float
    """Slope of the activation below zero: 0 for ReLU, 1 for none."""


Sinks = tuple[Tensor | None, Tensor | None]
"""Where the gradients of weight and bias go; None: new memory."""


def batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running: tuple[Tensor, Tensor],
    norm: Norm,
    *,
    residual: Tensor | None = None,
    sinks: Sinks = (None, None),
) -> Tensor:
    """Return act(x̂ · weight + bias + residual), by the batch's own mean and variance.

    `running` are mean and variance over batches, which are updated in place.
    """
    y: Tensor = _BatchNorm.apply(x, weight, bias, residual, running, norm, sinks)
    return y


def serves(x: Tensor, residual: Tensor | None) -> bool:
    """Whether the kernels support these activations."""
    if x.dim() != 4 or not cuda.available(x.device) or not x.numel():
        return False
    if x.dtype not in (torch.float32, torch.bfloat16) or x.shape[1] % VECTOR:
        return False
    if residual is None:
        return True
    return residual.dtype == x.dtype and residual.shape == x.shape


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        residual: Tensor | None,
        running: tuple[Tensor, Tensor],
        norm: Norm,
        sinks: Sinks,
    ) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        if residual is not None:
            residual = residual.contiguous(memory_format=torch.channels_last)
        launch = _Launch(x, norm, residual=residual is not None)
        parts = launch.sums("forward_sums", x)
        y = torch.empty_like(x)
        moments = weight.new_empty(2, x.shape[1])
        results = (y, moments, *running)
        launch.apply("forward_apply", x, residual, weight, bias, parts, *results)
        # Without a residual, the kernel computes the activation's input again from x
        # and the moments, so y need not be kept.
        ctx.save_for_backward(x, y if launch.residual else None, weight, bias, moments)
        ctx.launch = launch
        ctx.sinks = sinks
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, y, weight, bias, moments = ctx.saved_tensors
        launch: _Launch = ctx.launch
        dy = dy.contiguous(memory_format=torch.channels_last)
        d_residual = torch.empty_like(x) if launch.residual else None
        tensors = (x, y, dy, weight, bias, moments, d_residual)
        parts = launch.sums("backward_sums", *tensors)
        dx = torch.empty_like(x)
        d_weight, d_bias = _gradients(weight, bias, ctx.sinks)
        launch.apply("backward_apply", *tensors, parts, dx, d_weight, d_bias)
        return dx, d_weight, d_bias, d_residual, None, None, None


def _gradients(weight: Tensor, bias: Tensor, sinks: Sinks) -> tuple[Tensor, Tensor]:
    """Return memory for the gradients of weight and bias."""
    of_weight, of_bias = sinks
    if of_weight is None:
        of_weight = torch.empty_like(weight)
    if of_bias is None:
        of_bias = torch.empty_like(bias)
    return of_weight, of_bias


class _Launch:
    """The kernels for activations of one shape, and their grids."""

    def __init__(self, x: Tensor, norm: Norm, *, residual: bool) -> None:
        self.residual = residual
        self._channels = x.shape[1]
        self._rows = x.numel() // self._channels
        self._whole = self._rows <= WHOLE_ROWS
        width = _width(self._channels, whole=self._whole)
        self._key = (norm, residual, x.dtype, width, self._whole, x.device.index)
        self._groups = self._channels // width
        rows_at_once = THREADS // (width // VECTOR)
        slices = -(-self._rows // rows_at_once)
        # Each block takes the rows of one group of channels, so groups share the
        # blocks.
        self._summing = max(1, min(slices, SUMMING // self._groups))
        self._applying = max(1, min(slices, APPLYING // self._groups))
        if self._whole:
            self._applying = 1

    def sums(self, name: str, x: Tensor, *tensors: Tensor | None) -> Tensor | None:
        """Return [slices, 2, channels]: each summing block's sums of two quantities;
        None if the kernel that applies them also sums.
        """
        if self._whole:
            return None
        parts = torch.empty(self._summing, 2, self._channels, device=x.device)
        grid = (self._summing, self._groups)
        kernel = _kernel(name, *self._key)
        kernel(grid, x, *tensors, parts, self._rows, self._channels)
        return parts

    def apply(self, name: str, *tensors: Tensor | None) -> None:
        """Launch the kernel that adds up those sums and processes all activations."""
        grid = (self._applying, self._groups)
        kernel = _kernel(name, *self._key)
        kernel(grid, *tensors, self._rows, self._channels, self._summing)


def _width(channels: int, *, whole: bool) -> int:
    """Return the channels of a block: a power of two that divides the total."""
    width = WHOLE_WIDEST if whole else WIDEST
    while channels % width:
        width //= 2
    return width


@cache
def _kernel(
    name: str,
    norm: Norm,
    residual: bool,
    dtype: torch.dtype,
    width: int,
    whole: bool,
    device: int,
) -> cuda.Kernel:
    macros = batch_norm_macros(
        norm, residual=residual, dtype=dtype, width=width, whole=whole
    )
    return cuda.Kernel("batch_norm.cu", name, macros, threads=THREADS)


def batch_norm_macros(
    norm: Norm, *, residual: bool, dtype: torch.dtype, width: int, whole: bool
) -> cuda.Macros:
    """Return the macros for compiling the kernels."""
    return (
        ("BF16", int(dtype == torch.bfloat16)),
        ("RESIDUAL", int(residual)),
        ("WHOLE", int(whole)),
        ("WIDTH", width),
        ("THREADS", THREADS),
        ("EPS", f"{float(norm.eps)!r}f"),
        ("MOMENTUM", f"{float(norm.momentum)!r}f"),
        ("SLOPE", f"{float(norm.slope)!r}f"),
    )
