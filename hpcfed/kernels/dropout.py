"""Dropout with the clients' own random numbers as one kernel, without a stored mask."""

import ctypes
import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpcfed.kernels import cpu, cuda

_THREADS = 256
_CPU_SOURCE = "cpu_dropout.c"


def serves(x: Tensor) -> bool:
    """Whether a kernel can drop such values, and its compiler exists."""
    if x.dtype != torch.float32:
        return False
    if x.device.type == "cpu":
        return cpu.library(_CPU_SOURCE) is not None
    return cuda.available(x.device)


def dropout(x: Tensor, keys: Tensor, p: float, *, flat: bool = False) -> Tensor:
    """Zero values if `randomness.uniform` of the client's key is below p.

    The others are scaled by 1 / (1 − p). With `flat`, images are flattened to vectors,
    one channel after the other.
    """
    # On a CPU values are contiguous before they are dropped.
    if x.is_cuda and flat and x.dim() == 4 and not x.is_contiguous():
        turned: Tensor = _TurningDropout.apply(x, keys, p)
        return turned
    y: Tensor = _Dropout.apply(x, keys, p)
    return y.flatten(1) if flat else y


class _Dropout(torch.autograd.Function):
    """Draws the same mask again in the backward pass, from the same keys."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, p: float) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.p = p
        return _dropped(x, keys, p)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (keys,) = ctx.saved_tensors
        return _dropped(dy, keys, ctx.p), None, None


class _TurningDropout(torch.autograd.Function):
    """Also converts channels-last images to vectors, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, p: float) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.p = p
        ctx.shape = x.shape
        x = x.contiguous(memory_format=torch.channels_last)
        y = x.new_empty(len(x), x[0].numel())
        _turn(x, y, keys, p, x.shape, backward=False)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (keys,) = ctx.saved_tensors
        dx = torch.empty(
            ctx.shape,
            dtype=dy.dtype,
            device=dy.device,
            memory_format=torch.channels_last,
        )
        _turn(dy.contiguous(), dx, keys, ctx.p, ctx.shape, backward=True)
        return dx, None, None


def _turn(
    x: Tensor, y: Tensor, keys: Tensor, p: float, shape: torch.Size, *, backward: bool
) -> None:
    """Drop values of x while moving them to the other layout, into y."""
    samples, channels, height, width = shape
    pixels = height * width
    kernel = _kernel(
        "turning_dropout", channels, pixels, p, x.device.index, backward=backward
    )
    # A block transposes a square of 32 × 32 values through shared memory.
    squares = -(-channels // 32) * -(-pixels // 32)
    kernel((squares, samples), x, y, keys.contiguous(), x.numel() // len(keys))


def _dropped(x: Tensor, keys: Tensor, p: float) -> Tensor:
    return (_dropped_on_gpu if x.is_cuda else _dropped_on_cpu)(x, keys, p)


def _dropped_on_cpu(x: Tensor, keys: Tensor, p: float) -> Tensor:
    library = cpu.library(_CPU_SOURCE)
    assert library is not None, "only where it serves"
    x = x.contiguous()
    y = torch.empty_like(x)
    keys = keys.contiguous()
    sizes = (len(keys), x.numel() // len(keys), _threshold(p))
    library.dropout(
        *(cpu.pointer(tensor) for tensor in (x, y, keys)),
        *map(ctypes.c_long, sizes),
        ctypes.c_float(1 - p),
    )
    return y


def _threshold(p: float) -> int:
    """Return p as a 24-bit integer, rounded up: uniform numbers have 24 bits."""
    return math.ceil(p * 2**24)


def _dropped_on_gpu(x: Tensor, keys: Tensor, p: float) -> Tensor:
    # Random numbers are indexed channels-first, whatever the layout in memory, so that
    # a CPU drops the same values.
    channels = 1
    pixels = x[0].numel()
    if x.dim() == 4 and not x.is_contiguous():
        x = x.contiguous(memory_format=torch.channels_last)
        channels = x.shape[1]
        pixels = x.shape[2] * x.shape[3]
    else:
        x = x.contiguous()
    y = torch.empty_like(x)
    kernel = _kernel("dropout", channels, pixels, p, x.device.index)
    blocks = -(-x.numel() // _THREADS)
    per_client = x.numel() // len(keys)
    kernel((blocks, 1), x, y, keys.contiguous(), per_client, x.numel())
    return y


@cache
def _kernel(
    name: str,
    channels: int,
    pixels: int,
    p: float,
    device: int,
    *,
    backward: bool = False,
) -> cuda.Kernel:
    macros = (
        ("CHANNELS", channels),
        ("PIXELS", pixels),
        ("THRESHOLD", _threshold(p)),
        ("SCALE", f"{1 / (1 - p)!r}f"),
        ("BACKWARD", int(backward)),
    )
    return cuda.Kernel("dropout.cu", name, macros, threads=_THREADS)
