"""The two ends of a training step: the images of a batch, and the loss with its
gradient.

A step is a row of the table of samples [steps, capacity, slots]; which row, stands in
the tensor `step` on the device, so that a captured step serves for all of them. On a
GPU each end is one kernel.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpcfed.kernels import cuda

_THREADS = 128
REACH = 4
"""Pixels by which an image may be shifted, each way."""
_SHIFTS = 2 * REACH + 1
MOVES = 2 * _SHIFTS**2
"""Ways to move an image: number m shifts by m % 9 rows and m / 9 % 9 columns, less 4,
and mirrors it if m ≥ 81.
"""


def gather_images(
    images: Tensor,
    samples: Tensor,
    step: Tensor,
    clients: int,
    slots: int,
    *,
    moves: Tensor | None = None,
    blank: Tensor | None = None,
) -> Tensor:
    """Images [clients · slots, channels, height, width] of this step, from all
    [samples, height, width, channels].

    `moves`, of the samples' shape, says how each is moved; `blank` [channels] is what
    comes in from beyond its edges.
    """
    if not _serves(images):
        found = images.index_select(
            0, samples.index_select(0, step)[0, :clients, :slots].flatten()
        )
        if moves is not None:
            assert blank is not None
            found = moved(
                found, moves.index_select(0, step)[0, :clients, :slots].flatten(), blank
            )
        return found.permute(0, 3, 1, 2)
    out = torch.empty(clients * slots, *images.shape[1:], device=images.device)
    table = (samples, step, samples.shape[1], samples.shape[2], slots)
    if moves is None:
        kernel = _kernel("gather_images", images.device.index, FLOATS=images[0].numel())
        kernel((slots, clients), images, out, *table)
    else:
        height, width, channels = images.shape[1:]
        kernel = _kernel(
            "gather_moved",
            images.device.index,
            HEIGHT=height,
            WIDTH=width,
            CHANNELS=channels,
        )
        kernel((slots, clients), images, out, *table, moves, blank)
    return out.permute(0, 3, 1, 2)


def moved(images: Tensor, moves: Tensor, blank: Tensor) -> Tensor:
    """Images [samples, height, width, channels], each moved in its own way: cut out of
    a wider one, then mirrored.
    """
    height, width = images.shape[1:3]
    rows, columns = (
        torch.arange(side, device=images.device) for side in (height, width)
    )
    y = rows + (moves % _SHIFTS - REACH)[:, None]
    mirrored = (moves // _SHIFTS**2 == 1)[:, None]
    x = (
        torch.where(mirrored, width - 1 - columns, columns)
        + (moves // _SHIFTS % _SHIFTS - REACH)[:, None]
    )
    inside = ((y >= 0) & (y < height))[:, :, None] & ((x >= 0) & (x < width))[
        :, None, :
    ]
    own = torch.arange(len(images), device=images.device)[:, None, None]
    found = images[
        own, y.clamp(0, height - 1)[:, :, None], x.clamp(0, width - 1)[:, None, :]
    ]
    return torch.where(inside[..., None], found, blank)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    samples: Tensor,
    counts: Tensor,
    step: Tensor,
    total: Tensor,
) -> Tensor:
    """A scalar to differentiate: its gradient is that of the sum of the clients' mean
    losses. Its value means nothing.

    Adds each client's summed loss to `total`. Logits are [clients · slots, classes];
    `counts` [steps, capacity] are the slots that hold a sample, others count for
    nothing.
    """
    loss: Tensor = _CrossEntropy.apply(logits, labels, samples, counts, step, total)
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, *table: Tensor) -> Tensor:
        ctx.save_for_backward(_gradient(logits, *table))
        return logits.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_loss: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        if (
            gradient.is_cuda
        ):  # the first node of the backward pass, in a thread of its own
            cuda.make_current(gradient.device.index)
        return gradient, None, None, None, None, None


def _gradient(
    logits: Tensor,
    labels: Tensor,
    samples: Tensor,
    counts: Tensor,
    step: Tensor,
    total: Tensor,
) -> Tensor:
    clients, slots = len(total), len(logits) // len(total)
    if _serves(logits):
        gradient = torch.empty_like(logits)
        kernel = _kernel("cross_entropy", logits.device.index, CLASSES=logits.shape[1])
        table = (
            labels,
            samples,
            counts,
            step,
            samples.shape[1],
            samples.shape[2],
            slots,
        )
        kernel((clients, 1), logits.contiguous(), gradient, total, *table)
        return gradient
    batch = samples.index_select(0, step)[0, :clients, :slots]
    count = counts.index_select(0, step)[0, :clients, None]
    valid = torch.arange(slots, device=logits.device) < count
    right = labels[batch].flatten()
    losses = F.cross_entropy(logits, right, reduction="none").view_as(batch)
    total += torch.where(valid, losses, 0).sum(
        1
    )  # not a product: empty slots may hold NaN
    gradient = logits.softmax(1)
    gradient[torch.arange(len(right), device=logits.device), right] -= 1
    means = gradient.unflatten(0, (clients, slots)) / count.clamp(min=1)[..., None]
    return torch.where(valid[..., None], means, 0).flatten(0, 1)


def _serves(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and cuda.available(tensor.device)


@cache
def _kernel(name: str, device: int, **sizes: int) -> cuda.Kernel:
    return cuda.Kernel("batch.cu", name, macros(**sizes), threads=_THREADS)


def macros(**sizes: int) -> cuda.Macros:
    """For a kernel; those that others need are there too, since a source is compiled as
    a whole.
    """
    usual = dict.fromkeys(("FLOATS", "CLASSES", "HEIGHT", "WIDTH", "CHANNELS"), 1)
    return tuple({**usual, "REACH": REACH, **sizes}.items())
