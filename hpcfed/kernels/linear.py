"""Linear layers of many clients: each with its own weights, and with gradients that go
where they belong.

A layer with many weights and few samples costs memory traffic alone: its gradient and
the step of SGD are then made in one pass over the weights, which so update themselves
during the backward pass.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpcfed.kernels import cuda, sgd
from hpcfed.kernels.sgd import Rule

MANY_WEIGHTS = 2**18
FEW_SAMPLES = 16
_THREADS = 128


@dataclass(frozen=True)
class Update:
    """How weights that update themselves do that."""

    velocity: Tensor | None
    lr: Tensor
    rule: Rule


def updates_itself(weight: Tensor, slots: int) -> bool:
    """Whether a layer with weights [clients, outputs, inputs] should, for so many
    samples of a client.
    """
    return (
        weight[0].numel() >= MANY_WEIGHTS and slots <= FEW_SAMPLES and _serves(weight)
    )


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    sinks: tuple[Tensor | None, Tensor | None] = (None, None),
    update: Update | None = None,
    branch: cuda.Branch | None = None,
) -> Tensor:
    """x wᵀ + b for every client: [clients, slots, inputs] to [clients, slots, outputs].

    Gradients of weight and bias are written to their sinks, if given, in the branch.
    With `update` the weights are updated in the backward pass and have no gradient; x
    must then be differentiable.
    """
    y: Tensor = _Linear.apply(x, weight, bias, sinks, update, branch or cuda.Branch())
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sinks: tuple[Tensor | None, Tensor | None],
        update: Update | None,
        branch: cuda.Branch,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sinks, ctx.update, ctx.branch = sinks, update, branch
        transposed = weight.transpose(1, 2)
        return (
            torch.bmm(x, transposed)
            if bias is None
            else torch.baddbmm(bias.unsqueeze(1), x, transposed)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        weight_sink, bias_sink = ctx.sinks
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        apart = (weight_sink is not None or not needs_weight) and (
            bias_sink is not None or not needs_bias
        )
        with ctx.branch.work(x, dy) if apart else nullcontext():
            dw = (
                torch.bmm(dy.transpose(1, 2), x, out=weight_sink)
                if needs_weight
                else None
            )
            db = torch.sum(dy, 1, out=bias_sink) if needs_bias else None
        if ctx.update is not None:
            dx: Tensor | None = _backward_and_update(dy, x, weight, ctx.update)
        else:
            dx = torch.bmm(dy, weight) if needs_x else None
        return dx, dw, db, None, None, None


def _backward_and_update(
    dy: Tensor, x: Tensor, weight: Tensor, update: Update
) -> Tensor:
    if not _serves(weight):
        dx = torch.bmm(dy, weight)
        # `data`, because autograd counts changes of the whole matrix, of which other
        # layers' weights are a part.
        sgd.descend(
            weight.data,
            torch.bmm(dy.transpose(1, 2), x),
            update.velocity,
            None,
            update.lr,
            update.rule,
        )
        return dx
    dx = torch.empty_like(x)
    clients, slots, inputs = x.shape
    kernel = _kernel(slots, weight.shape[1], update.rule, x.device.index)
    grid = (-(-inputs // (4 * _THREADS)), clients)
    kernel(
        grid,
        dy.contiguous(),
        x,
        weight,
        update.velocity,
        dx,
        update.lr,
        inputs,
        weight.stride(0),
    )
    return dx


def _serves(weight: Tensor) -> bool:
    aligned = (
        weight.shape[2] % 4 == 0
        and weight.stride(0) % 4 == 0
        and weight.storage_offset() % 4 == 0
    )
    return (
        bool(aligned)
        and weight.dtype == torch.float32
        and cuda.available(weight.device)
    )


@cache
def _kernel(slots: int, outputs: int, rule: Rule, device: int) -> cuda.Kernel:
    macros = (
        ("SLOTS", slots),
        ("OUTPUTS", outputs),
        ("MOMENTUM", f"{float(rule.momentum)!r}f"),
        ("DECAY", f"{float(rule.weight_decay)!r}f"),
    )
    return cuda.Kernel("linear.cu", "linear_backward", macros, threads=_THREADS)
