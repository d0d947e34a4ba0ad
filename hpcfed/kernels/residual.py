"""Frozen norms of transformers, together with the residual sums around them.

A block of a transformer adds a branch to its residual and normalises the sum; backwards,
the sum gets two gradients. On a GPU in bfloat16 each way is one pass over memory. Weights
are constants.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hpcfed.kernels import cuda

_VECTOR = 8
"""Numbers that a thread loads at once."""
_VECTORS = 4
"""The most vectors of a thread, if a block may have as many threads as that needs."""
_MOST_THREADS = 512
_MOST_WIDTH = 16_384


class FrozenNorm:
    """What a layer norm, or an RMS norm, does to a row."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, eps: float, *, rms: bool
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.eps = eps
        self.rms = rms

    def plainly(self, x: Tensor) -> Tensor:
        """Normalise by torch's own functions."""
        shape = self.weight.shape
        if self.rms:
            return F.rms_norm(x, shape, self.weight, self.eps)
        return F.layer_norm(x, shape, self.weight, self.bias, self.eps)


def normalised(
    norm: FrozenNorm, branch: Tensor, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return branch + residual, and the norm of it."""
    served = _serves(branch, norm) and (residual is None or _serves(residual, norm))
    if served:
        both: tuple[Tensor, Tensor] = _Normalised.apply(branch, residual, norm)
        return both
    total = branch if residual is None else branch + residual
    return total, norm.plainly(total)


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, branch: Tensor, residual: Tensor | None, norm: FrozenNorm
    ) -> tuple[Tensor, Tensor]:
        rows = branch.numel() // branch.shape[-1]
        total = branch if residual is None else torch.empty_like(branch)
        y = torch.empty_like(branch)
        moments = branch.new_empty(rows, 2, dtype=torch.float32)
        kernel = _kernel("forward", norm, branch.device.index)
        kernel((rows, 1), branch, residual, norm.weight, norm.bias, total, y, moments)
        ctx.save_for_backward(total, norm.weight, moments)
        ctx.norm = norm
        ctx.set_materialize_grads(False)
        # A view: autograd takes an input that is returned as it is for a changed one.
        return total.view_as(total), y

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_total: Tensor | None, dy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None]:
        added = ctx.needs_input_grad[1]
        if dy is None:
            return d_total, d_total if added else None, None
        x, weight, moments = ctx.saved_tensors
        dx = torch.empty_like(x)
        if d_total is not None:
            d_total = cuda.aligned(d_total.contiguous())
        kernel = _kernel("backward", ctx.norm, x.device.index)
        dy = cuda.aligned(dy.contiguous())
        kernel((len(moments), 1), x, dy, d_total, weight, moments, dx)
        return dx, dx if added else None, None


def _serves(x: Tensor, norm: FrozenNorm) -> bool:
    """Whether the kernels can load eight numbers of a row at once."""
    width = x.shape[-1]
    if norm.weight.shape != (width,) or width % _VECTOR or width > _MOST_WIDTH:
        return False
    if not (x.numel() and cuda.available(x.device)):
        return False
    numbers = [x, norm.weight]
    if norm.bias is not None:
        numbers.append(norm.bias)
    for tensor in numbers:
        halves = tensor.dtype == torch.bfloat16 and tensor.is_contiguous()
        if not halves or tensor.data_ptr() % cuda.WIDEST_LOAD:
            return False
    return not norm.weight.requires_grad


def block_threads(width: int) -> int:
    """Return the threads of a row: whole warps, a power of two of them."""
    threads = 32
    while threads * _VECTORS * _VECTOR < width and threads < _MOST_THREADS:
        threads *= 2
    return threads


def _kernel(name: str, norm: FrozenNorm, device: int) -> cuda.Kernel:
    return _compiled(name, len(norm.weight), norm.eps, norm.rms, device)


@cache
def _compiled(name: str, width: int, eps: float, rms: bool, device: int) -> cuda.Kernel:
    threads = block_threads(width)
    macros = (
        ("WIDTH", width),
        ("THREADS", threads),
        ("RMS", int(rms)),
        ("EPS", f"{float(eps)!r}f"),
    )
    return cuda.Kernel("residual.cu", name, macros, threads=threads)
