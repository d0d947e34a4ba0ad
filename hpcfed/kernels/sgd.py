"""One step of SGD on the rows of many clients, in one pass over memory where a GPU
allows.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from hpcfed.kernels import cuda

_THREADS = 256


@dataclass(frozen=True)
class Rule:
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0
    """Largest norm of a client's gradient; 0: no limit."""


@torch.no_grad()
def descend(
    rows: Tensor,
    gradient: Tensor,
    velocity: Tensor | None,
    moving: Tensor | None,
    lr: Tensor,
    rule: Rule,
) -> None:
    """Moves rows [clients, columns] in place; columns where `moving` is False keep
    their bits.

    Rows, gradient and velocity are slices of matrices with the same strides, and may
    have more dimensions. Gradients of columns that may not move do not count for the
    clipping. `lr` is a tensor, so that it may change between two replays of a captured
    step. `velocity` is None without momentum.
    """
    if not rows.numel():
        return
    scale = None
    if rule.clip:
        counted = gradient if moving is None else gradient * moving
        scale = (rule.clip / (counted.norm(dim=1) + 1e-6)).clamp(max=1.0)
    columns, stride = rows[0].numel(), rows.stride(0)
    aligned = columns % 4 == stride % 4 == rows.storage_offset() % 4 == 0
    if (
        rows.dtype == torch.float32
        and aligned
        and gradient.stride(0) == stride
        and cuda.available(rows.device)
    ):
        kernel = _kernel(rule, moving is not None, rows.device.index)
        blocks = min(-(-rows.numel() // (4 * _THREADS)), 4 * kernel.capacity)
        kernel(
            (blocks, 1),
            rows,
            gradient,
            velocity,
            lr,
            scale,
            moving,
            columns,
            stride,
            rows.numel(),
        )
        return
    if scale is not None:
        gradient = gradient * scale[:, None]
    if rule.weight_decay:
        gradient = gradient.add(rows, alpha=rule.weight_decay)
    if velocity is not None:
        gradient = velocity.mul_(rule.momentum).add_(gradient)
    after = torch.addcmul(rows, gradient, lr, value=-1)
    rows.copy_(after if moving is None else torch.where(moving, after, rows))


@cache
def _kernel(rule: Rule, masked: bool, device: int) -> cuda.Kernel:
    macros = (
        ("MOMENTUM", f"{float(rule.momentum)!r}f"),
        ("DECAY", f"{float(rule.weight_decay)!r}f"),
        ("CLIPPED", int(rule.clip > 0)),
        ("MASKED", int(masked)),
    )
    return cuda.Kernel("sgd.cu", "sgd", macros, threads=_THREADS)
