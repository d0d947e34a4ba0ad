"""The two ends of a training step: the samples of a batch, and the loss with its
gradient.

A step is a row of the table of samples [steps, capacity, slots]. Its number is in the
tensor `step` on the device, so that one captured step serves all. On a GPU each end is
one kernel.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpcfed.kernels import cuda

MOST_CLIENTS = 65_535
"""The most clients of a stack: a kernel has a block for each in the grid's second
dimension, whose size is limited to this.
"""
_THREADS = 128
REACH = 4
"""The most pixels by which an image is shifted in each direction."""
_PER_AXIS = 2 * REACH + 1
SHIFTS = 2 * _PER_AXIS**2
"""Number of ways to shift an image. Number s shifts by s % 9 rows and s / 9 % 9
columns, minus 4, and mirrors the image if s ≥ 81.
"""


def gatherable(inputs: Tensor) -> Tensor:
    """Return inputs in the layout that steps gather: images with channels last."""
    if not _are_images(inputs):
        return inputs.contiguous()
    # Copies nothing if images are channels-last.
    return inputs.permute(0, 2, 3, 1).contiguous()


def gather_inputs(
    inputs: Tensor,
    samples: Tensor,
    step: Tensor,
    clients: int,
    slots: int,
    *,
    shifts: Tensor | None = None,
    blank: Tensor | None = None,
) -> Tensor:
    """Return the first clients' inputs of this step, [clients · slots, …], taken from
    all `gatherable` ones; images become [clients · slots, channels, height, width].

    `shifts`, in the shape of the samples, says how each image is shifted; `blank`
    [channels] fills its edges.
    """
    if not _are_images(inputs):
        return gather_samples(inputs, samples, step, clients, slots)
    images = inputs
    if not _serves(images):
        chosen = _of_step(samples, step, clients, slots)
        found = images.index_select(0, chosen)
        if shifts is not None:
            assert blank is not None
            shift = _of_step(shifts, step, clients, slots)
            found = shifted(found, shift, blank)
        return found.permute(0, 3, 1, 2)
    # A block per image: slots in the grid's first dimension, clients in its second.
    out = torch.empty(clients * slots, *images.shape[1:], device=images.device)
    table = (samples, step, samples.shape[1], samples.shape[2], slots)
    if shifts is None:
        kernel = _kernel("gather_images", images.device.index, FLOATS=images[0].numel())
        kernel((slots, clients), images, out, *table)
    else:
        height, width, channels = images.shape[1:]
        kernel = _kernel(
            "gather_shifted",
            images.device.index,
            HEIGHT=height,
            WIDTH=width,
            CHANNELS=channels,
        )
        kernel((slots, clients), images, out, *table, shifts, blank)
    return out.permute(0, 3, 1, 2)


def _are_images(inputs: Tensor) -> bool:
    return inputs.dim() == 4


def gather_samples(
    inputs: Tensor, samples: Tensor, step: Tensor, clients: int, slots: int
) -> Tensor:
    """Return this step's inputs [clients · slots, …]; tokens stay int64."""
    whole_floats = inputs.dtype in (torch.float32, torch.int64)
    if not (whole_floats and cuda.available(inputs.device)):
        return inputs.index_select(0, _of_step(samples, step, clients, slots))
    out = inputs.new_empty(clients * slots, *inputs.shape[1:])
    # The kernel copies bits: it treats a token as two floats.
    floats = inputs[0].numel() * inputs.element_size() // 4
    kernel = _kernel("gather_images", inputs.device.index, FLOATS=floats)
    table = (samples, step, samples.shape[1], samples.shape[2], slots)
    kernel((slots, clients), inputs, out, *table)
    return out


def _of_step(table: Tensor, step: Tensor, clients: int, slots: int) -> Tensor:
    """Return a step's row of a table, flat; the host does not know which step it is."""
    row = table.index_select(0, step)[0]
    return row[:clients, :slots].flatten()


def shifted(images: Tensor, shifts: Tensor, blank: Tensor) -> Tensor:
    """Return images [samples, height, width, channels], each shifted in its own way.

    An image is cut out of a wider one with blank edges, then mirrored.
    """
    height, width = images.shape[1:3]
    rows = torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device)
    down = (shifts % _PER_AXIS - REACH)[:, None]
    right = (shifts // _PER_AXIS % _PER_AXIS - REACH)[:, None]
    mirrored = (shifts // _PER_AXIS**2 == 1)[:, None]
    # Where each pixel of the result comes from.
    y = rows + down
    x = torch.where(mirrored, width - 1 - columns, columns) + right
    y_inside = ((y >= 0) & (y < height))[:, :, None]
    x_inside = ((x >= 0) & (x < width))[:, None, :]
    image = torch.arange(len(images), device=images.device)[:, None, None]
    # Clamped only to be a valid index: pixels outside become blank.
    y = y.clamp(0, height - 1)[:, :, None]
    x = x.clamp(0, width - 1)[:, None, :]
    inside = (y_inside & x_inside)[..., None]
    return torch.where(inside, images[image, y, x], blank)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    samples: Tensor,
    counts: Tensor,
    step: Tensor,
    total: Tensor,
) -> Tensor:
    """Return a scalar whose gradient is that of the sum of the clients' mean losses.

    Its value is meaningless. Add each client's summed loss to `total`. Logits are
    [clients · slots, classes]; `counts` [steps, capacity] say how many slots hold a
    sample, and the others are ignored.
    """
    loss: Tensor = _CrossEntropy.apply(logits, labels, samples, counts, step, total)
    return loss


class _CrossEntropy(torch.autograd.Function):
    """Computes the gradient in the forward pass, in the same kernel as the loss."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, *table: Tensor) -> Tensor:
        ctx.save_for_backward(_gradient(logits, *table))
        # The value is never read, so it is left uninitialised.
        return logits.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_loss: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        if gradient.is_cuda:
            # The first node of the backward pass, which runs in its own thread.
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
    """Return the gradient of each client's mean loss, and add its loss to `total`."""
    clients = len(total)
    slots = len(logits) // len(total)
    if _serves(logits):
        gradient = torch.empty_like(logits)
        kernel = _kernel("cross_entropy", logits.device.index, CLASSES=logits.shape[1])
        # Capacity and width of the table may be larger than this step.
        shape = (samples.shape[1], samples.shape[2], slots)
        table = (labels, samples, counts, step, *shape)
        kernel((clients, 1), logits.contiguous(), gradient, total, *table)
        return gradient
    batch, count, valid = of_step(samples, counts, step, clients, slots)
    targets = labels[batch].flatten()
    losses = F.cross_entropy(logits, targets, reduction="none").view_as(batch)
    # Not a product with `valid`: empty slots may hold NaN.
    total += torch.where(valid, losses, 0).sum(1)
    # ∂ loss / ∂ logits = softmax(logits) − onehot(target)
    gradient = logits.softmax(1)
    samples_in_turn = torch.arange(len(targets), device=logits.device)
    gradient[samples_in_turn, targets] -= 1
    # At least 1: rounded-up stacks hold clients without samples in this step.
    divisor = count.clamp(min=1)[..., None]
    means = gradient.unflatten(0, (clients, slots)) / divisor
    return torch.where(valid[..., None], means, 0).flatten(0, 1)


def of_step(
    samples: Tensor, counts: Tensor, step: Tensor, clients: int, slots: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a step's samples [clients, slots], their counts [clients, 1], and a mask
    [clients, slots], True if a slot holds a sample.
    """
    batch = samples.index_select(0, step)[0, :clients, :slots]
    count = counts.index_select(0, step)[0, :clients, None]
    valid = torch.arange(slots, device=samples.device) < count
    return batch, count, valid


def _serves(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and cuda.available(tensor.device)


@cache
def _kernel(name: str, device: int, **sizes: int) -> cuda.Kernel:
    return cuda.Kernel("batch.cu", name, macros(**sizes), threads=_THREADS)


def macros(**sizes: int) -> cuda.Macros:
    """Return a kernel's macros, and 1 for macros that only other kernels need.

    They must be defined because a source is compiled as a whole.
    """
    others = dict.fromkeys(("FLOATS", "CLASSES", "HEIGHT", "WIDTH", "CHANNELS"), 1)
    return tuple({**others, "REACH": REACH, **sizes}.items())
