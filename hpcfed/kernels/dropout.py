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
    """Zero values where `randomness.uniform` of the client's key is below p.

    The others are scaled by 1 / (1 − p).
    """
    y: Tensor = _Dropout.apply(x, keys, p)
    return y


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


def _dropped(x: Tensor, keys: Tensor, p: float) -> Tensor:
    # Random numbers count values channels-first, whatever the layout in memory, so that
    # a CPU drops the same ones.
    channels = 1
    pixels = x[0].numel()
    if x.dim() == 4 and not x.is_contiguous():
        x = x.contiguous(memory_format=torch.channels_last)
        channels = x.shape[1]
        pixels = x.shape[2] * x.shape[3]
    else:
        x = x.contiguous()
    y = torch.empty_like(x)
    kernel = _kernel(channels, pixels, p, x.device.index)
    blocks = -(-x.numel() // _THREADS)
    per_client = x.numel() // len(keys)
    kernel((blocks, 1), x, y, keys.contiguous(), per_client, x.numel())
    return y


@cache
def _kernel(channels: int, pixels: int, p: float, device: int) -> Kernel:
    # The smallest number of 24 bits that is at least p: a uniform number has 24.
    threshold = math.ceil(p * 2**24)
    macros = (
        ("CHANNELS", channels),
        ("PIXELS", pixels),
        ("THRESHOLD", threshold),
        ("SCALE", f"{1 / (1 - p)!r}f"),
    )
    return Kernel("dropout.cu", "dropout", macros, threads=_THREADS)
