"""Dropout with the clients' own random numbers as one kernel; the mask is never in
memory.
"""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpcfed.kernels.cuda import Kernel

_THREADS = 256


def dropout(x: Tensor, keys: Tensor, p: float) -> Tensor:
    """Zeroes values where `streams.uniform` of the client's key is below p, and scales
    the others by 1 / (1 − p).
    """
    y: Tensor = _Dropout.apply(x, keys, p)
    return y


class _Dropout(torch.autograd.Function):
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


def _dropped(x: Tensor, keys: Tensor, p: float) -> Tensor:
    channels, pixels = 1, x[0].numel()
    if x.dim() == 4 and not x.is_contiguous():
        x = x.contiguous(memory_format=torch.channels_last)
        channels, pixels = x.shape[1], x.shape[2] * x.shape[3]
    else:
        x = x.contiguous()
    y = torch.empty_like(x)
    kernel = _kernel(channels, pixels, p, x.device.index)
    kernel(
        (-(-x.numel() // _THREADS), 1),
        x,
        y,
        keys.contiguous(),
        x.numel() // len(keys),
        x.numel(),
    )
    return y


@cache
def _kernel(channels: int, pixels: int, p: float, device: int) -> Kernel:
    threshold = math.ceil(
        p * 2**24
    )  # the smallest number of 24 bits that is at least p
    macros = (
        ("CHANNELS", channels),
        ("PIXELS", pixels),
        ("THRESHOLD", threshold),
        ("SCALE", f"{1 / (1 - p)!r}f"),
    )
    return Kernel("dropout.cu", "dropout", macros, threads=_THREADS)
