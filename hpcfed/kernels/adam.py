"""One step of Adam or AdamW on the rows of many clients, in one pass over memory if a
GPU allows.

Kingma and Ba 2015, Algorithm 1; Loshchilov and Hutter 2019, Algorithm 2. Results are
those of torch.optim.Adam and torch.optim.AdamW.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from hpcfed.kernels import cuda
from hpcfed.kernels.sgd import THREADS, clip_scale, per_client, serves


@dataclass(frozen=True)
class AdamRule:
    """The constants of a step, except the learning rate."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    """Whether decay shrinks the row itself (AdamW) or adds to the gradient (Adam)."""
    clip: float = 0.0
    """Largest norm of a client's gradient; 0: no limit."""


def bias_corrections(rule: AdamRule, steps: int, like: Tensor) -> Tensor:
    """Return 1 − β₁ᵗ and √(1 − β₂ᵗ) for steps t = 1, 2, …, as [steps, 2]."""
    # In float64: 1 − 0.999 has only four correct digits in float32.
    t = torch.arange(1, steps + 1, dtype=torch.float64, device=like.device)
    first = 1 - rule.beta1**t
    second = 1 - rule.beta2**t
    return torch.stack([first, second.sqrt()], dim=1).to(like.dtype)


@torch.no_grad()
def descend(
    rows: Tensor,
    gradient: Tensor,
    means: Tensor,
    squares: Tensor,
    trainable: Tensor | None,
    lr: Tensor,
    bias: Tensor,
    step: Tensor,
    rule: AdamRule,
) -> None:
    """Take a step with rows [clients, columns] in place.

    `means` and `squares` are the running moments of the gradient, zero before the first
    step. `bias` is the table of corrections, and `step` [1] counts from 0. It is on the
    device, because a captured step is replayed. The rest is as in SGD.
    """
    if not rows.numel():
        return
    scale = clip_scale(gradient, trainable, rule.clip)
    if serves(rows, gradient):
        columns = rows.shape[1]
        kernel = _kernel(rule, trainable is not None, lr.dim() > 0, rows.device.index)
        # Four columns per thread; if rows are longer, threads loop.
        blocks = min(-(-rows.numel() // (4 * THREADS)), 4 * kernel.capacity)
        # The stride is that of the whole matrix: `rows` may be a slice of its columns.
        sizes = (columns, rows.stride(0), rows.numel())
        state = (rows, gradient, means, squares)
        kernel((blocks, 1), *state, lr, bias, step, scale, trainable, *sizes)
        return
    if scale is not None:
        gradient = gradient * scale[:, None]
    rate = per_client(lr, rows)
    start = rows
    if rule.decoupled:
        start = rows * (1 - rate * rule.weight_decay)
    elif rule.weight_decay:
        gradient = gradient.add(rows, alpha=rule.weight_decay)
    means.lerp_(gradient, 1 - rule.beta1)
    squares.mul_(rule.beta2).addcmul_(gradient, gradient, value=1 - rule.beta2)
    # Looked up on the device: reading `step` would make the host wait.
    first, second_root = bias.index_select(0, step)[0]
    spread = squares.sqrt().div_(second_root).add_(rule.epsilon)
    after = start - rate / first * (means / spread)
    rows.copy_(after if trainable is None else torch.where(trainable, after, rows))


@cache
def _kernel(rule: AdamRule, masked: bool, rate_each: bool, device: int) -> cuda.Kernel:
    macros = (
        ("KEEP1", f"{float(1 - rule.beta1)!r}f"),
        ("BETA2", f"{float(rule.beta2)!r}f"),
        ("KEEP2", f"{float(1 - rule.beta2)!r}f"),
        ("EPSILON", f"{float(rule.epsilon)!r}f"),
        ("DECAY", f"{float(rule.weight_decay)!r}f"),
        ("DECOUPLED", int(rule.decoupled)),
        ("CLIPPED", int(rule.clip > 0)),
        ("MASKED", int(masked)),
        ("RATE_EACH", int(rate_each)),
    )
    return cuda.Kernel("adam.cu", "adam", macros, threads=THREADS)
