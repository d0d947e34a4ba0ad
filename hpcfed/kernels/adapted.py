"""A linear layer that all clients share, with each client's own adapter: W x + b + s B A x.

All clients' samples go through W in one product. The adapter adds to its result in place,
forward and backward, so that results of the layer's size are written once. In bfloat16 the
gradients of adapters are summed and returned in float32.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hpcfed.kernels import cuda
from hpcfed.runtime import own_kernels

EIGHT = 8
"""Numbers of bfloat16 that are loaded at once, and must begin at a multiple of 16 bytes."""
IMPOSSIBLE = -1e4
"""The logit of a token that does not exist."""


class AdapterMemory(NamedTuple):
    """What an adapter's owner holds for it."""

    halves: tuple[Tensor | None, Tensor | None] = (None, None)
    """Both factors in bfloat16."""
    sinks: tuple[Tensor | None, Tensor | None] = (None, None)
    """Where their gradients go, instead of new memory."""
    branch: cuda.Branch | None = None
    """Where gradients that go to sinks are computed."""

    def aside(
        self, needed: Sequence[bool], *tensors: Tensor
    ) -> AbstractContextManager[None]:
        """Let the branch compute the gradients that are needed from these tensors.

        Autograd waits for a gradient without a sink, so it cannot go there.
        """
        waits = any(n and s is None for n, s in zip(needed, self.sinks, strict=True))
        if self.branch is None or waits:
            return nullcontext()
        return self.branch.work(*tensors)


OWN = AdapterMemory()


class Parts(NamedTuple):
    """A layer and the clients' adapters."""

    weight: Tensor
    """[outputs, inputs]; a constant, like the bias."""
    bias: Tensor | None
    down: Tensor
    """[clients, rank, inputs]."""
    up: Tensor
    """[clients, outputs, rank]."""
    scale: float
    memory: AdapterMemory = OWN

    def factors(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return both factors in the type of `like`; their owner may have them."""
        (half_down, half_up), dtype = self.memory.halves, like.dtype
        return _either(self.down, half_down, dtype), _either(self.up, half_up, dtype)


def padding_of(outputs: int) -> int:
    """Return how many outputs make their number a multiple of eight."""
    return -outputs % EIGHT


def padded(
    weight: Tensor, bias: Tensor | None, padding: int
) -> tuple[Tensor, Tensor | None]:
    """Return weights [outputs, inputs] and biases with further, impossible outputs."""
    if not padding:
        return weight, bias
    if bias is None:
        bias = weight.new_zeros(len(weight))
    wider = F.pad(weight, (0, 0, 0, padding))
    return wider, F.pad(bias, (0, padding), value=IMPOSSIBLE)


def adapted(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    scale: float,
    memory: AdapterMemory = OWN,
) -> Tensor:
    """Return [clients, samples, outputs] of [clients, samples, inputs]; see Parts."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        # Not within: autocast would convert some of the operands only.
        x, weight = (each.to(torch.get_autocast_dtype(kind)) for each in (x, weight))
        bias = None if bias is None else bias.to(x.dtype)
    with torch.autocast(kind, enabled=False):
        parts = Parts(weight, bias, down, up, scale, memory)
        y: Tensor = _Adapted.apply(x, down, up, parts)
    return y


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, down: Tensor, up: Tensor, parts: Parts) -> Tensor:
        ctx.types = down.dtype, up.dtype
        ctx.memory = parts.memory
        ctx.scale = parts.scale
        down, up = parts.factors(x)
        inner = scaled_product(x, down.mT, parts.scale)
        ctx.save_for_backward(x, parts.weight, down, up, inner)
        return F.linear(x, parts.weight, parts.bias).baddbmm_(inner, up.mT)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, down, up, inner = ctx.saved_tensors
        needs_x, needs_down, needs_up, _ = ctx.needs_input_grad
        to_down, to_up = ctx.memory.sinks
        dx = of_down = of_up = None
        d_inner = inner
        if needs_x or needs_down:
            d_inner = scaled_product(dy, up, ctx.scale)
        with ctx.memory.aside((needs_down, needs_up), dy, inner, d_inner, x):
            if needs_up:
                of_up = gradient_of(dy.mT, inner, ctx.types[1], to_up)
            if needs_down:
                of_down = gradient_of(d_inner.mT, x, ctx.types[0], to_down)
        if needs_x:
            dx = torch.matmul(dy, weight).baddbmm_(d_inner, down)
        return dx, of_down, of_up, None


def _either(factor: Tensor, half: Tensor | None, dtype: torch.dtype) -> Tensor:
    return factor.to(dtype) if half is None or half.dtype != dtype else half


def scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return scale · a · b of every client."""
    nothing = a.new_empty(()).expand(*a.shape[:2], b.shape[2])
    return torch.baddbmm(nothing, a, b, beta=0, alpha=scale)


def _widens(a: Tensor) -> bool:
    """Whether a product's result may have a wider type: only CUDA's libraries know it."""
    return a.is_cuda and not torch.version.hip and own_kernels.are_allowed()


def gradient_of(
    a: Tensor, b: Tensor, dtype: torch.dtype, sink: Tensor | None
) -> Tensor:
    """Return a · b of every client, not rounded to a shorter type, in its sink."""
    if a.dtype != dtype and _widens(a):
        return torch.bmm(a, b, out_dtype=dtype, out=sink)
    return torch.bmm(a.to(dtype), b.to(dtype), out=sink)
