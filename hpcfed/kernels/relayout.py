"""Copies rows to another order of columns, at the speed of memory."""

from functools import cache

import torch
from torch import Tensor

from hpcfed.kernels import cuda

_THREADS = 256
_CLIENTS_AT_ONCE = 4


def serves(*matrices: Tensor) -> bool:
    """Whether kernels can copy between these matrices of contiguous rows."""
    for matrix in matrices:
        if matrix.dtype != torch.float32 or matrix.stride(1) != 1:
            return False
    return cuda.available(matrices[0].device)


def fill(rows: Tensor, to: Tensor, table: Tensor) -> None:
    """Set column j of `to` to column `table[j]` of the rows, or to 0 if that is -1.

    `to` is aligned, and has a multiple of four columns.
    """
    blocks = -(-to.shape[1] // (4 * _THREADS))
    _launch("fill_columns", blocks, rows, to, table)


def set_columns(rows: Tensor, to: Tensor, table: Tensor) -> None:
    """Set column j of `to` to column `table[j]` of the rows, unless that is -1."""
    blocks = -(-to.shape[1] // _THREADS)
    _launch("set_columns", blocks, rows, to, table)


def _launch(name: str, blocks: int, rows: Tensor, to: Tensor, table: Tensor) -> None:
    clients = len(rows)
    if not clients or not blocks:
        return
    grid = (blocks, -(-clients // _CLIENTS_AT_ONCE))
    sizes = (len(table), rows.stride(0), to.stride(0), clients)
    _kernel(name, rows.device.index)(grid, rows, to, table, *sizes)


@cache
def _kernel(name: str, device: int) -> cuda.Kernel:
    return cuda.Kernel("relayout.cu", name, (), threads=_THREADS)
