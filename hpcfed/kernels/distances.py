"""Distances between the rows of two matrices, without a matrix of their differences."""

from functools import cache

import torch
from torch import Tensor

from hpcfed.kernels import cuda

_THREADS = 256
_CHUNK = 2**14
"""How many columns' squares a block adds up."""


def serves(a: Tensor, b: Tensor) -> bool:
    """Whether a kernel can read these rows."""
    for matrix in (a, b):
        if matrix.dtype != torch.float32 or matrix.stride(1) != 1:
            return False
    return cuda.available(a.device) and 0 < len(a) <= 65_535 and a.shape[1] > 0


def row_distances(a: Tensor, b: Tensor) -> Tensor:
    """Return ‖aᵢ − bᵢ‖ of all rows; sums are taken in a fixed order."""
    columns = a.shape[1]
    chunks = -(-columns // _CHUNK)
    parts = a.new_empty(len(a), chunks)
    strides = (a.stride(0), b.stride(0))
    _kernel(a.device.index)((chunks, len(a)), a, b, parts, columns, *strides)
    return parts.sum(1).sqrt()


@cache
def _kernel(device: int) -> cuda.Kernel:
    macros = (("THREADS", _THREADS), ("CHUNK", _CHUNK))
    return cuda.Kernel("distances.cu", "squared_distances", macros, threads=_THREADS)
