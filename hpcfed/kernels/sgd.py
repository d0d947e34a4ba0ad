"""One step of SGD on many clients' rows, in one pass over memory if a GPU allows."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from hpcfed.kernels import cuda

THREADS = 256


@dataclass(frozen=True)
class Rule:
    """The constants of a step, except the learning rate."""

    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0
    """Largest norm of a client's gradient; 0: no limit."""
    nesterov: bool = False
    """Whether the step is gradient + momentum × velocity, as in torch.optim.SGD."""

    @property
    def macros(self) -> cuda.Macros:
        """The constants, for kernels."""
        return (
            ("MOMENTUM", f"{float(self.momentum)!r}f"),
            ("NESTEROV", int(self.nesterov)),
            ("DECAY", f"{float(self.weight_decay)!r}f"),
        )


@torch.no_grad()
def descend(
    rows: Tensor,
    gradient: Tensor,
    velocity: Tensor | None,
    trainable: Tensor | None,
    lr: Tensor,
    rule: Rule,
) -> None:
    """Take a step with rows [clients, columns] in place.

    Columns where `trainable` is False keep their bits, and clipping ignores their
    gradients. Rows, gradient and velocity are slices of matrices with the same strides,
    and may have more dimensions. `lr` is a tensor, one number or one per client, so
    that it may change between two replays of a captured step. `velocity` is None
    without momentum.
    """
    if not rows.numel():
        return
    scale = clip_scale(gradient, trainable, rule.clip)
    if serves(rows, gradient):
        columns = rows[0].numel()
        stride = rows.stride(0)
        kernel = _kernel(rule, trainable is not None, lr.dim() > 0, rows.device.index)
        # Four columns per thread; if rows are longer, threads loop.
        blocks = min(-(-rows.numel() // (4 * THREADS)), 4 * kernel.capacity)
        sizes = (columns, stride, rows.numel())
        kernel((blocks, 1), rows, gradient, velocity, lr, scale, trainable, *sizes)
        return
    if (
        scale is None
        and trainable is None
        and lr.dim() == 0
        and rows.device.type == "cpu"
    ):
        _descend_in_one_pass(rows, gradient, velocity, lr, rule)
        return
    # Not in place: the caller's gradient must not change, as with the kernel.
    if scale is not None:
        gradient = gradient * scale[:, None]
    if rule.weight_decay:
        gradient = gradient.add(rows, alpha=rule.weight_decay)
    if velocity is not None:
        # Without dampening, as torch's default; from zero, so the first step is the
        # gradient.
        velocity.mul_(rule.momentum).add_(gradient)
        if rule.nesterov:
            gradient = gradient.add(velocity, alpha=rule.momentum)
        else:
            gradient = velocity
    # addcmul, because `lr` is a tensor, and `add` only takes a number.
    after = torch.addcmul(rows, gradient, per_client(lr, rows), value=-1)
    rows.copy_(after if trainable is None else torch.where(trainable, after, rows))


def _descend_in_one_pass(
    rows: Tensor, gradient: Tensor, velocity: Tensor | None, lr: Tensor, rule: Rule
) -> None:
    """Take the step by torch's fused SGD, which reads and writes every value once."""
    # It needs dense tensors: each row is dense, even if the matrix is a slice.
    torch._fused_sgd_(
        list(rows),
        list(gradient),
        list(velocity) if velocity is not None and rule.momentum else [],
        weight_decay=rule.weight_decay,
        momentum=rule.momentum,
        lr=lr,
        dampening=0.0,
        nesterov=rule.nesterov,
        maximize=False,
        # A velocity of zero has the same effect as a first step.
        is_first_step=False,
    )


def clip_scale(
    gradient: Tensor, trainable: Tensor | None, clip: float
) -> Tensor | None:
    """Return the factor that limits each gradient's norm; None without a limit."""
    if not clip:
        return None
    counted = gradient
    if trainable is not None:
        # Not a product: a frozen column may hold the infinity of an earlier stack.
        counted = gradient.where(trainable, 0)
    # 1e-6, as in torch.nn.utils.clip_grad_norm_.
    return (clip / (counted.norm(dim=1) + 1e-6)).clamp(max=1.0)


def per_client(lr: Tensor, rows: Tensor) -> Tensor:
    """Return learning rates that broadcast against the rows."""
    if lr.dim() == 0:
        return lr
    return lr.view(-1, *[1] * (rows.dim() - 1))


def serves(rows: Tensor, gradient: Tensor) -> bool:
    """Whether a kernel can load four floats at once from these rows."""
    columns = rows[0].numel()
    stride = rows.stride(0)
    if rows.dtype != torch.float32 or gradient.stride(0) != stride:
        return False
    aligned = columns % 4 == stride % 4 == rows.storage_offset() % 4 == 0
    return bool(aligned) and cuda.available(rows.device)


@cache
def _kernel(rule: Rule, masked: bool, rate_each: bool, device: int) -> cuda.Kernel:
    macros = (
        *rule.macros,
        ("CLIPPED", int(rule.clip > 0)),
        ("MASKED", int(masked)),
        ("RATE_EACH", int(rate_each)),
    )
    return cuda.Kernel("sgd.cu", "sgd", macros, threads=THREADS)
