"""Two linear layers with adapters, and GELU between them.

One pass adds what the adapter adds, and applies GELU: the widest tensors of a block are
read and written less often than by a layer, an activation, and a layer.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hpcfed.kernels import cuda
from hpcfed.kernels.adapted import (
    AdapterMemory,
    Parts,
    adapted,
    gradient_of,
    scaled_product,
)

_THREADS = 256
_WIDTH = 256
_ROWS = 128
"""Rows of a block; columns and threads above are those of the kernel, too."""
_MOST_BLOCKS = 65_535
"""CUDA's limit of a grid's second direction."""
_MOST_RANK = 32
"""Beyond it, tensor cores take less time than another pass over memory."""


def feed_forward(x: Tensor, first: Parts, second: Parts) -> Tensor:
    """Return [clients, samples, outputs] of [clients, samples, inputs]."""
    if not _serves(x, first, second):
        return adapted(F.gelu(adapted(x, *first), approximate="tanh"), *second)
    factors = (first.down, first.up, second.down, second.up)
    y: Tensor = _FeedForward.apply(x, *factors, first, second)
    return y


def _serves(x: Tensor, first: Parts, second: Parts) -> bool:
    """Whether the kernel can load eight numbers at once, and layers follow the rules."""
    if not (x.dtype == first.weight.dtype == second.weight.dtype == torch.bfloat16):
        return False
    width, ranks = first.weight.shape[0], (first.down.shape[1], second.down.shape[1])
    few = len(x) * -(-x.shape[1] // _ROWS) <= _MOST_BLOCKS
    fits = few and width % 8 == 0 and max(ranks) <= _MOST_RANK
    return fits and cuda.available(x.device) and not torch.is_autocast_enabled("cuda")


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        first_down: Tensor,
        first_up: Tensor,
        second_down: Tensor,
        second_up: Tensor,
        first: Parts,
        second: Parts,
    ) -> Tensor:
        ctx.scales = first.scale, second.scale
        ctx.memories = first.memory, second.memory
        ctx.dtype = first_down.dtype
        factors = *first.factors(x), *second.factors(x)
        inner = scaled_product(x, factors[0].mT, first.scale)
        hidden = F.linear(x, first.weight, first.bias)
        active = torch.empty_like(hidden)
        _pass_between(hidden, active, inner, factors[1], forward=True)
        second_inner = scaled_product(active, factors[2].mT, second.scale)
        y = F.linear(active, second.weight, second.bias)
        ctx.save_for_backward(
            x,
            first.weight,
            inner,
            hidden,
            *factors,
            active,
            second.weight,
            second_inner,
        )
        return y.baddbmm_(second_inner, factors[3].mT)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inner, hidden, *factors, active, second_weight, second_inner = (
            ctx.saved_tensors
        )
        down, up, second_down, second_up = factors
        scale, second_scale = ctx.scales
        memory, second_memory = ctx.memories
        needs_x, *needs = ctx.needs_input_grad[:5]
        d_second = scaled_product(dy, second_up, second_scale)
        pairs = ((d_second, active), (dy, second_inner))
        of_second = _gradients(pairs, second_memory, needs[2:], ctx.dtype)
        d_hidden = torch.matmul(dy, second_weight)
        _pass_between(d_hidden, hidden, d_second, second_down, forward=False)
        d_inner = scaled_product(d_hidden, up, scale)
        pairs = ((d_inner, x), (d_hidden, inner))
        of_first = _gradients(pairs, memory, needs[:2], ctx.dtype)
        dx = None
        if needs_x:
            dx = torch.matmul(d_hidden, weight).baddbmm_(d_inner, down)
        return dx, *of_first, *of_second, None, None


def _gradients(
    pairs: Sequence[tuple[Tensor, Tensor]],
    memory: AdapterMemory,
    needed: Sequence[bool],
    dtype: torch.dtype,
) -> list[Tensor | None]:
    """Return the products of pairs that are needed, in their sinks."""
    found: list[Tensor | None] = []
    with memory.aside(needed, *(each for pair in pairs for each in pair)):
        for (a, b), sink, wanted in zip(pairs, memory.sinks, needed, strict=True):
            found.append(gradient_of(a.mT, b, dtype, sink) if wanted else None)
    return found


def _pass_between(
    sums: Tensor, other: Tensor, inner: Tensor, factor: Tensor, *, forward: bool
) -> None:
    """Add inner · factor to the sums. Forward, `other` becomes GELU of them; backward,
    they are multiplied by its derivative there.
    """
    clients, rows, columns = sums.shape
    rank = inner.shape[2]
    # Its own client's factor must be contiguous; clients may be far apart.
    if not factor[0].is_contiguous():
        factor = factor.contiguous()
    kernel = _kernel(rank, forward, sums.device.index)
    grid = (-(-columns // _WIDTH), clients * -(-rows // _ROWS))
    sizes = (rows, columns, factor.stride(0))
    kernel(grid, sums, other, inner.contiguous(), factor, *sizes)


@cache
def _kernel(rank: int, forward: bool, device: int) -> cuda.Kernel:
    macros = (("RANK", rank), ("FORWARD", int(forward)))
    return cuda.Kernel("feed_forward.cu", "between", macros, threads=_THREADS)
