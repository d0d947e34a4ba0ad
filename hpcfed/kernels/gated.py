"""silu(gate) · up of gated linear layers: forward and backward each in one pass over
memory, where torch takes two and three.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hpcfed.kernels import cuda

_THREADS = 256
_PER_THREAD = 8


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up."""
    if _serves(gate) and _serves(up):
        y: Tensor = _Gated.apply(gate, up)
        return y
    return F.silu(gate) * up


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        y = torch.empty_like(gate)
        _launch("forward", gate, up, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
        _launch("backward", gate, up, cuda.aligned(dy.contiguous()), of_gate, of_up)
        return of_gate, of_up


def _serves(x: Tensor) -> bool:
    """Whether the kernel can load eight numbers at once."""
    halves = x.dtype == torch.bfloat16 and x.is_contiguous()
    whole = x.numel() % _PER_THREAD == 0 and x.data_ptr() % cuda.WIDEST_LOAD == 0
    return halves and whole and cuda.available(x.device)


def _launch(name: str, *tensors: Tensor) -> None:
    size = tensors[0].numel()
    blocks = -(-size // (_PER_THREAD * _THREADS))
    _kernel(name, tensors[0].device.index)((blocks, 1), *tensors, size)


@cache
def _kernel(name: str, device: int) -> cuda.Kernel:
    return cuda.Kernel("gated.cu", name, (), threads=_THREADS)
