"""Dropout of many clients on a CPU in one pass; its mask is never in memory."""

import ctypes
import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpcfed.kernels import cpu

_SOURCE = "cpu_dropout.c"


def serves(x: Tensor) -> bool:
    """Whether the kernel can drop such values, and there is a compiler."""
    known = x.device.type == "cpu" and x.dtype == torch.float32
    return known and cpu.library(_SOURCE) is not None


def dropout(x: Tensor, keys: Tensor, p: float) -> Tensor:
    """Zero values where `randomness.uniform` of the client's key is below p.

    The others are divided by 1 − p.
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
    library = cpu.library(_SOURCE)
    assert library is not None, "only where it serves"
    # Random numbers count values channels-first, whatever the layout in memory.
    x = x.contiguous()
    y = torch.empty_like(x)
    keys = keys.contiguous()
    # The smallest number of 24 bits that is at least p: a uniform number has 24.
    threshold = math.ceil(p * 2**24)
    sizes = (len(keys), x.numel() // len(keys), threshold)
    library.dropout(
        *(cpu.pointer(tensor) for tensor in (x, y, keys)),
        *map(ctypes.c_long, sizes),
        ctypes.c_float(1 - p),
    )
    return y
