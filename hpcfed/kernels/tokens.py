"""The loss of the next token, with its gradient in the memory of the logits.

Logits [tokens, vocabulary], in float32 or bfloat16, are the largest tensor of a language
model. The gradient is as large, and replaces them: no other tensor of this size is ever
needed.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpcfed.kernels import cuda

_MOST_THREADS = 1024
_PER_THREAD = 8
"""Logits that a thread reads, if the vocabulary is small enough."""

_OF_KERNEL = 1024
"""Bytes of shared memory that the kernel and the driver take besides."""

_VIEWS = {
    "AliasBackward0",
    "ReshapeAliasBackward0",
    "SqueezeBackward1",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
}
"""Autograd's names for operations that only change the shape."""
_FORGETFUL = {
    "AddBackward0",
    "AddmmBackward0",
    "BaddbmmBackward0",
    "BmmBackward0",
    "MmBackward0",
    "ToCopyBackward0",
    "_AdaptedBackward",
    "_LinearBackward",
}
"""Operations that create new memory and do not need it in their backward pass."""


def next_token(logits: Tensor, targets: Tensor, total: Tensor, seen: Tensor) -> Tensor:
    """Return a scalar whose gradient is that of the sum of the clients' mean losses.

    Its value is meaningless. Logits [clients · slots, length, vocabulary] may be
    overwritten. Targets are [clients · slots, length]. A target below 0 is ignored, and
    a client without any other has gradient 0. Add each client's summed loss to `total`,
    and its number of targets to `seen`.
    """
    overwrites = _is_forgotten(logits)
    loss: Tensor = _NextToken.apply(logits, targets, total, seen, overwrites)
    return loss


def _is_forgotten(logits: Tensor) -> bool:
    """Tell whether the layer that made the logits no longer needs them.

    If this is wrong, autograd notices: the kernel counts as a change in place.
    """
    node = logits.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    return node is not None and node.name() in _FORGETFUL


class _NextToken(torch.autograd.Function):
    """Computes the gradient in the forward pass, together with the loss."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        total: Tensor,
        seen: Tensor,
        overwrites: bool,
    ) -> Tensor:
        vocabulary = logits.shape[-1]
        gradient = logits.detach()
        if not (overwrites and gradient.is_contiguous()):
            gradient = gradient.clone(memory_format=torch.contiguous_format)
        counts = (targets >= 0).view(len(total), -1).sum(1)
        losses = _differentiate(gradient.view(-1, vocabulary), targets, counts)
        total += losses.view(len(total), -1).sum(1)
        seen += counts
        ctx.save_for_backward(gradient)
        # The value is never read, so it is left uninitialised.
        return logits.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_loss: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        if gradient.is_cuda:
            # The first node of the backward pass, which runs in its own thread.
            cuda.make_current(gradient.device.index)
        return gradient, None, None, None, None


def _differentiate(logits: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
    """Replace logits by the gradient of their client's mean loss; return losses."""
    flat = targets.flatten()
    tokens = len(flat) // len(counts)
    halves = logits.dtype == torch.bfloat16
    known = halves or logits.dtype == torch.float32
    aligned = logits.data_ptr() % cuda.WIDEST_LOAD == 0
    if known and aligned and cuda.available(logits.device):
        losses = logits.new_empty(len(flat), dtype=torch.float32)
        kernel = _kernel(logits.device.index, logits.shape[1], halves)
        blocks = min(len(flat), kernel.capacity)
        kernel((blocks, 1), logits, losses, flat, counts, tokens, len(flat))
        # Tell autograd: a layer that needs its output must not silently get this.
        torch.autograd.graph.increment_version(logits)
        return losses
    if halves:
        exact = logits.float()
        losses = _differentiate(exact, targets, counts)
        logits.copy_(exact)
        return losses
    valid = flat >= 0
    token = torch.arange(len(flat), device=logits.device)
    target = flat.clamp(min=0)
    at_target = logits[token, target]
    # Subtracted before the exponential, so that it cannot overflow.
    most = logits.amax(1)
    sums = logits.sub_(most[:, None]).exp_().sum(1)
    losses = sums.log() + most - at_target
    # ∂ loss / ∂ logits = softmax(logits) − onehot(target)
    logits.div_(sums[:, None])
    logits[token, target] -= 1
    # At least 1: a client may have no target in this step.
    divisors = counts.clamp(min=1).repeat_interleave(tokens, output_size=len(flat))
    logits.div_(divisors[:, None])
    # Not a product with `valid`: empty slots may hold NaN.
    logits.masked_fill_(~valid[:, None], 0)
    return torch.where(valid, losses, 0)


@cache
def _kernel(device: int, vocabulary: int, halves: bool) -> cuda.Kernel:
    # Whole warps, because the kernel reduces warp by warp.
    warps = -(-vocabulary // (32 * _PER_THREAD))
    threads = min(_MOST_THREADS, 32 * warps)
    properties = torch.cuda.get_device_properties(device)
    most = properties.shared_memory_per_block_optin - _OF_KERNEL
    row = vocabulary * (2 if halves else 4)
    kept = vocabulary % _PER_THREAD == 0 and row <= most
    macros = (
        ("VOCABULARY", vocabulary),
        ("BF16", int(halves)),
        ("THREADS", threads),
        ("KEPT", int(kept)),
    )
    shared = row if kept else 0
    return cuda.Kernel(
        "tokens.cu", "next_token", macros, threads=threads, shared=shared
    )
