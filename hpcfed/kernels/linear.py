"""Linear layers of many clients, each with its own weights. Gradients are written where
they belong.

For a layer with many weights and few samples, memory traffic is the only cost. Then its
gradient and the step of SGD are done in one pass over the weights: the weights update
themselves during the backward pass.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpcfed.kernels import cuda, few_samples, sgd
from hpcfed.kernels.sgd import Rule

MANY_WEIGHTS = 2**18
"""A layer may update itself if a client has at least this many weights."""
FEW_SAMPLES = 16
"""A layer may update itself if a client has at most this many samples: a thread keeps
two columns of each in registers.
"""
_THREADS = 256
_CHUNK = 448
"""Columns of a client that a block of the forward pass sums over. Then its samples fit
into shared memory, and there are blocks for all multiprocessors.
"""


@dataclass(frozen=True)
class Update:
    """How weights update themselves."""

    velocity: Tensor | None
    lr: Tensor
    """One number, or one per client."""
    rule: Rule


def updates_itself(weight: Tensor, slots: int) -> bool:
    """Whether a layer with weights [clients, outputs, inputs] should update itself, for
    `slots` samples per client.
    """
    return _is_traffic(weight, slots) and few_samples.is_loadable(weight)


def activated(y: Tensor, slope: float) -> Tensor:
    """Return the activation of y that has this slope below zero; 1: none."""
    if slope == 0:
        return F.relu(y)
    return y if slope == 1 else F.leaky_relu(y, slope)


def _is_traffic(weight: Tensor, slots: int) -> bool:
    """Whether a layer's cost is mainly memory traffic."""
    return weight[0].numel() >= MANY_WEIGHTS and slots <= FEW_SAMPLES


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    sinks: tuple[Tensor | None, Tensor | None] = (None, None),
    update: Update | None = None,
    branch: cuda.Branch | None = None,
    slope: float = 1,
    widest: bool = False,
) -> Tensor:
    """Return x wᵀ + b of every client, activated: [clients, slots, inputs] to [clients,
    slots, outputs].

    Gradients of weight and bias are written to their sinks, if given, in the branch.
    With `update` the weights are updated in the backward pass and have no gradient; x
    must then be differentiable. `widest`: no step of this training has more slots.
    """
    # Only in steps of whole batches: every number of samples is a kernel of its own.
    if widest and update is None and few_samples.serves(x, weight):
        few: Tensor = _FewSamples.apply(x, weight, bias, sinks, slope)
        return few
    y: Tensor = _Linear.apply(x, weight, bias, sinks, update, branch or cuda.Branch())
    return activated(y, slope)


class _FewSamples(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sinks: tuple[Tensor | None, Tensor | None],
        slope: float,
    ) -> Tensor:
        x = x.contiguous()
        y = few_samples.forward(x, weight, bias, slope)
        ctx.save_for_backward(x, weight, y)
        ctx.sinks, ctx.slope, ctx.biased = sinks, slope, bias is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, y = ctx.saved_tensors
        dw, db = ctx.sinks
        if dw is None or not few_samples.is_loadable(dw):
            dw = x.new_empty(weight.shape)
        if db is None and ctx.biased:
            db = x.new_empty(weight.shape[:2])
        needs_x = ctx.needs_input_grad[0]
        dx = few_samples.backward(
            dy, y, x, weight, ctx.slope, (dw, db), needs_x=needs_x
        )
        return dx, dw, db, None, None


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
        ctx.sinks = sinks
        ctx.update = update
        ctx.branch = branch
        if _reads_once(x, weight):
            return _forward(x, weight, bias)
        transposed = weight.transpose(1, 2)
        # One batched product; cuBLAS reads the transposed weights in place.
        if bias is None:
            return torch.bmm(x, transposed)
        return torch.baddbmm(bias.unsqueeze(1), x, transposed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        weight_sink, bias_sink = ctx.sinks
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # Autograd waits for a gradient without a sink, so it cannot go to the branch.
        weight_aside = weight_sink is not None or not needs_weight
        bias_aside = bias_sink is not None or not needs_bias
        aside = nullcontext()
        if weight_aside and bias_aside:
            aside = ctx.branch.work(x, dy)
        dx = dw = db = None
        with aside:
            if needs_weight:
                dw = torch.bmm(dy.transpose(1, 2), x, out=weight_sink)
            if needs_bias:
                db = torch.sum(dy, 1, out=bias_sink)
        if ctx.update is not None:
            dx = _backward_and_update(dy, x, weight, ctx.update)
        elif needs_x:
            dx = torch.bmm(dy, weight)
        return dx, dw, db, None, None, None


def _backward_and_update(
    dy: Tensor, x: Tensor, weight: Tensor, update: Update
) -> Tensor:
    """Return the gradient of x, and take the step of SGD on the weights."""
    if not few_samples.is_loadable(weight):
        # Before the step: the gradient needs the old weights.
        dx = torch.bmm(dy, weight)
        gradient = torch.bmm(dy.transpose(1, 2), x)
        # `data`, because autograd tracks changes of the whole matrix, which also holds
        # other layers' weights.
        sgd.descend(
            weight.data, gradient, update.velocity, None, update.lr, update.rule
        )
        return dx
    dx = torch.empty_like(x)
    clients, slots, inputs = x.shape
    rate_each = update.lr.dim() > 0
    # The kernel reads each weight once: for the gradient of x, and for its own step.
    kernel = _kernel(slots, weight.shape[1], update.rule, rate_each, x.device.index)
    # Two columns per thread; one block loops over all outputs of a client.
    grid = (-(-inputs // (2 * _THREADS)), clients)
    tensors = (dy.contiguous(), x, weight, update.velocity, dx, update.lr)
    kernel(grid, *tensors, inputs, weight.stride(0))
    return dx


def _reads_once(x: Tensor, weight: Tensor) -> bool:
    """Whether our kernel should do the forward pass.

    cuBLAS uses one block per client for so few samples, which does not fill a device.
    """
    if not (_is_traffic(weight, x.shape[1]) and weight.shape[1] % 16 == 0):
        return False
    # A user who forbids TensorFloat-32 gets torch's product.
    return few_samples.is_loadable(weight) and torch.backends.cudnn.allow_tf32


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    clients, slots, inputs = x.shape
    outputs = weight.shape[1]
    chunks = -(-inputs // _CHUNK)
    x = x.contiguous()
    # Partial sums, added up in a fixed order.
    parts = x.new_empty(chunks, clients, slots, outputs)
    kernel = _forward_kernel("linear_forward", slots, outputs, x.device.index)
    kernel((chunks, clients), x, weight, parts, inputs, weight.stride(0), clients)
    y = x.new_empty(clients, slots, outputs)
    add = _forward_kernel("linear_sum", slots, outputs, x.device.index)
    stride = 0 if bias is None else bias.stride(0)
    blocks = -(-y.numel() // _THREADS)
    add((blocks, 1), parts, bias, y, chunks, stride, y.numel())
    return y


@cache
def _kernel(
    slots: int, outputs: int, rule: Rule, rate_each: bool, device: int
) -> cuda.Kernel:
    macros = (
        ("SLOTS", slots),
        ("OUTPUTS", outputs),
        ("THREADS", _THREADS),
        ("MIN_BLOCKS", 2),
        ("DEPTH", 8),
        *rule.macros,
        ("RATE_EACH", int(rate_each)),
    )
    return cuda.Kernel("linear.cu", "linear_backward", macros, threads=_THREADS)


@cache
def _forward_kernel(name: str, slots: int, outputs: int, device: int) -> cuda.Kernel:
    macros = (
        ("LINEAR_FORWARD", 1),
        ("SLOTS", slots),
        ("OUTPUTS", outputs),
        ("THREADS", _THREADS),
        ("MIN_BLOCKS", 2),
        ("CHUNK", _CHUNK),
        ("DEPTH", 4),
    )
    return cuda.Kernel("linear.cu", name, macros, threads=_THREADS)
