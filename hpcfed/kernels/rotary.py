"""Rotary positions of queries and keys: each way one pass over memory, where torch takes
a dozen.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpcfed.kernels import cuda

_VECTOR = 8
_MOST_THREADS = 256


def rotated(
    query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys [texts, heads, positions, width] by angles [texts or 1,
    positions, width], which are constants.
    """
    return _rotated(query, cosines, sines), _rotated(key, cosines, sines)


def turned(x: Tensor) -> Tensor:
    """Return (−second half, first half) of the last dimension."""
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def _rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    if _serves(x, cosines, sines):
        y: Tensor = _Rotated.apply(x, cosines, sines)
        return y
    return x * cosines[:, None] + turned(x) * sines[:, None]


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return _rotate(x, cosines, sines, backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        if not _is_loadable(dy):
            dy = dy.contiguous()
        return _rotate(cuda.aligned(dy), *ctx.saved_tensors, backward=True), None, None


def _rotate(x: Tensor, cosines: Tensor, sines: Tensor, *, backward: bool) -> Tensor:
    texts, heads, positions, width = x.shape
    # Heads of a position follow each other, as layers make and take them.
    y = x.new_empty(texts, positions, heads, width)
    half = width // 2
    threads = min(_MOST_THREADS, -(-heads * half // (32 * _VECTOR)) * 32)
    kernel = _kernel(half, backward, threads, x.device.index)
    of_text = 0 if len(cosines) == 1 else positions * width
    sizes = (heads, positions, *x.stride()[:3], of_text)
    kernel((texts * positions, 1), x, cosines, sines, y, *sizes)
    return y.transpose(1, 2)


def _serves(x: Tensor, cosines: Tensor, sines: Tensor) -> bool:
    if x.dim() != 4 or not x.numel() or not cuda.available(x.device):
        return False
    texts, _, positions, width = x.shape
    for angles in (cosines, sines):
        if angles.shape not in ((1, positions, width), (texts, positions, width)):
            return False
        if not angles.is_contiguous() or angles.requires_grad:
            return False
    # Both halves of a head are whole vectors.
    whole = width % (2 * _VECTOR) == 0
    return whole and all(_is_loadable(each) for each in (x, cosines, sines))


def _is_loadable(x: Tensor) -> bool:
    """Whether eight numbers of bfloat16 can be loaded at once everywhere."""
    *strides, last = x.stride()
    aligned = x.data_ptr() % cuda.WIDEST_LOAD == 0
    whole = last == 1 and all(stride % _VECTOR == 0 for stride in strides)
    return x.dtype == torch.bfloat16 and aligned and whole


@cache
def _kernel(half: int, backward: bool, threads: int, device: int) -> cuda.Kernel:
    macros = (("HALF", half), ("BACKWARD", int(backward)))
    return cuda.Kernel("rotary.cu", "rotate", macros, threads=threads)
