"""Small kernels on rows: the hash behind random numbers, distances between rows, and
copies to another order of columns, at the speed of memory.
"""

from functools import cache

import torch
from torch import Tensor

from hpcfed.kernels import cuda
from hpcfed.runtime import randomness

_THREADS = 256
_CHUNK = 2**14
"""How many columns' squares a block adds up."""
_CLIENTS_AT_ONCE = 4
"""Rows that a block copies."""


_DISTANCES: tuple[str, cuda.Macros] = (
    "distances.cu",
    (("THREADS", _THREADS), ("CHUNK", _CHUNK)),
)
SOURCES = (("mixing.cu", ()), ("relayout.cu", ()), _DISTANCES)
"""The sources of the kernels here, and their macros."""


@cache
def _kernel(file: str, name: str, device: int, macros: cuda.Macros = ()) -> cuda.Kernel:
    return cuda.Kernel(file, name, macros, threads=_THREADS)


def mixed(x: Tensor) -> Tensor | None:
    """Return splitmix64's finaliser of each number; None if no kernel supports it."""
    if not (x.dtype == torch.int64 and x.numel() and cuda.available(x.device)):
        return None
    x = x.contiguous()
    y = torch.empty_like(x)
    blocks = -(-x.numel() // _THREADS)
    _kernel("mixing.cu", "mix", x.device.index)((blocks, 1), x, y, x.numel())
    return y


# One kernel instead of eleven torch operations draws the random streams from here on.
randomness.mix_on_gpu = mixed


def serves(*matrices: Tensor) -> bool:
    """Whether kernels can read these matrices, whose rows must be contiguous."""
    for matrix in matrices:
        if matrix.dtype != torch.float32 or matrix.stride(1) != 1:
            return False
    return cuda.available(matrices[0].device)


def measures(a: Tensor, b: Tensor) -> bool:
    """Whether a kernel can compute the distances between these rows."""
    return serves(a, b) and 0 < len(a) <= 65_535 and a.shape[1] > 0


def row_distances(a: Tensor, b: Tensor) -> Tensor:
    """Return ‖aᵢ − bᵢ‖ of all rows, without a matrix of their differences; sums are
    taken in a fixed order.
    """
    columns = a.shape[1]
    chunks = -(-columns // _CHUNK)
    parts = a.new_empty(len(a), chunks)
    strides = (a.stride(0), b.stride(0))
    file, macros = _DISTANCES
    kernel = _kernel(file, "squared_distances", a.device.index, macros)
    kernel((chunks, len(a)), a, b, parts, columns, *strides)
    # Not by atomic adds, whose order changes from run to run.
    squares = parts.sum(1) if chunks > 1 else parts[:, 0]
    return squares.sqrt()


def fill(rows: Tensor, to: Tensor, table: Tensor) -> None:
    """Set column j of `to` to column `table[j]` of the rows, or to 0 if that is -1.

    `to` is aligned, and has a multiple of four columns.
    """
    blocks = -(-to.shape[1] // (4 * _THREADS))
    _copy("fill_columns", blocks, rows, to, table)


def set_columns(rows: Tensor, to: Tensor, table: Tensor) -> None:
    """Set column j of `to` to column `table[j]` of the rows, unless that is -1."""
    blocks = -(-to.shape[1] // _THREADS)
    _copy("set_columns", blocks, rows, to, table)


def _copy(name: str, blocks: int, rows: Tensor, to: Tensor, table: Tensor) -> None:
    clients = len(rows)
    if not clients or not blocks:
        return
    # A block reads its part of the table once for several clients.
    grid = (blocks, -(-clients // _CLIENTS_AT_ONCE))
    sizes = (len(table), rows.stride(0), to.stride(0), clients)
    _kernel("relayout.cu", name, rows.device.index)(grid, rows, to, table, *sizes)
