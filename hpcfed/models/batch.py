"""The two ends of a training step: the images of a batch, and the loss with its gradient.

A step is a row of the table of samples [steps, capacity, slots]; which row, stands in the tensor `step` on the device,
so that a captured step serves for all of them. On a GPU each end is one kernel.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpcfed.models import cuda

_THREADS = 128


def gather_images(images: Tensor, samples: Tensor, step: Tensor, clients: int, slots: int) -> Tensor:
    """Images [clients · slots, channels, height, width] of this step, from all [samples, height, width, channels]."""
    if not _serves(images):
        batch = samples.index_select(0, step)[0, :clients, :slots]
        return images.index_select(0, batch.flatten()).permute(0, 3, 1, 2)
    out = torch.empty(clients * slots, *images.shape[1:], device=images.device)
    kernel = _kernel("gather_images", "FLOATS", images[0].numel(), images.device.index)
    kernel((slots, clients), images, out, samples, step, samples.shape[1], samples.shape[2], slots)
    return out.permute(0, 3, 1, 2)


def cross_entropy(
    logits: Tensor, labels: Tensor, samples: Tensor, counts: Tensor, step: Tensor, total: Tensor
) -> Tensor:
    """A scalar to differentiate: its gradient is that of the sum of the clients' mean losses. Its value means nothing.

    Adds each client's summed loss to `total`. Logits are [clients · slots, classes]; `counts` [steps, capacity] are the
    slots that hold a sample, others count for nothing.
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
        if gradient.is_cuda:  # the first node of the backward pass, in a thread of its own
            cuda.make_current(gradient.device.index)
        return gradient, None, None, None, None, None


def _gradient(logits: Tensor, labels: Tensor, samples: Tensor, counts: Tensor, step: Tensor, total: Tensor) -> Tensor:
    clients, slots = len(total), len(logits) // len(total)
    if _serves(logits):
        gradient = torch.empty_like(logits)
        kernel = _kernel("cross_entropy", "CLASSES", logits.shape[1], logits.device.index)
        table = (labels, samples, counts, step, samples.shape[1], samples.shape[2], slots)
        kernel((clients, 1), logits.contiguous(), gradient, total, *table)
        return gradient
    batch = samples.index_select(0, step)[0, :clients, :slots]
    count = counts.index_select(0, step)[0, :clients, None]
    valid = torch.arange(slots, device=logits.device) < count
    right = labels[batch].flatten()
    losses = F.cross_entropy(logits, right, reduction="none").view_as(batch)
    total += (losses * valid).sum(1)
    gradient = logits.softmax(1)
    gradient[torch.arange(len(right), device=logits.device), right] -= 1
    return gradient * (valid.to(gradient.dtype) / count.clamp(min=1)).view(-1, 1)


def _serves(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and cuda.available(tensor.device)


@cache
def _kernel(name: str, macro: str, value: int, device: int) -> cuda.Kernel:
    macros = {"FLOATS": 1, "CLASSES": 1, macro: value}
    return cuda.Kernel("batch.cu", name, tuple(macros.items()), threads=_THREADS)
