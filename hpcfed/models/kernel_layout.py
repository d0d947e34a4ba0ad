"""Rows laid out for the kernels, while a stack of clients trains or is evaluated."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from hpcfed.models.layout import Entry, Layout, block_spans

ALIGNMENT = 4
"""Floats: a kernel loads 16 bytes at once, and a load must begin at a multiple of that."""

KernelRows = tuple[Tensor, Tensor]
"""Parameters and running statistics of some clients, a matrix each."""


class KernelLayout:
    """The columns of rows as the kernels want them.

    Parameters and running statistics are two matrices. On a GPU every tensor is aligned,
    and weights of convolutions are channels-last. Padding columns may lie between
    tensors; they are zero at first, and stay so as long as a row is finite. On the CPU
    tensors lie as in the plain rows.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.plain = layout
        self._channels_last = device.type == "cuda"
        alignment = ALIGNMENT if self._channels_last else 1
        self.widths = [0, 0]
        """Columns of the two matrices."""
        self.entries = []
        for e in layout.entries:
            matrix = 0 if e.trainable else 1
            # Where the matrix ends so far, rounded up.
            start = self.widths[matrix]
            stop = start + prod(e.shape)
            self.entries.append(replace(e, start=start, stop=stop))
            self.widths[matrix] = -(-stop // alignment) * alignment

    @property
    def padded(self) -> bool:
        """Whether padding columns lie between parameters."""
        return self.widths[0] > self.plain.num_parameters

    @property
    def block_spans(self) -> list[tuple[int, int]]:
        """Where each block starts and stops here, padding columns behind it included."""
        return block_spans(self.plain.blocks, self.entries, self.widths[0])

    # Zero, not empty: padding columns take part in norms and in SGD.
    def zeros(self, clients: int, like: Tensor) -> KernelRows:
        """Return both matrices, all zero."""
        parameters, statistics = self.widths
        return like.new_zeros(clients, parameters), like.new_zeros(clients, statistics)

    def view(self, matrix: Tensor, e: Entry) -> Tensor:
        """Return one tensor as a view [clients, *shape] of the matrix that holds it."""
        columns = matrix[:, e.start : e.stop]
        if self._channels_last and len(e.shape) == 4:
            # Stored with the inputs last; the view has torch's order of dimensions.
            outputs, inputs, height, width = e.shape
            stored = columns.unflatten(1, (outputs, height, width, inputs))
            return stored.permute(0, 1, 4, 2, 3)
        return columns.unflatten(1, e.shape)

    def views(self, parameters: Tensor, statistics: Tensor) -> dict[str, Tensor]:
        """Return every tensor by name."""
        named = {}
        for e in self.entries:
            matrix = parameters if e.trainable else statistics
            named[e.name] = self.view(matrix, e)
        return named

    def load(self, rows: Tensor, kernel_rows: KernelRows) -> None:
        """Copy plain rows into the two matrices."""
        for plain, laid_out in self._pairs(rows, *kernel_rows):
            laid_out.copy_(plain)

    def store(self, kernel_rows: KernelRows, rows: Tensor) -> None:
        """Copy the two matrices into plain rows."""
        for plain, laid_out in self._pairs(rows, *kernel_rows):
            plain.copy_(laid_out)

    def _pairs(
        self, rows: Tensor, parameters: Tensor, statistics: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of the same columns in plain rows and here."""
        if not self._channels_last:
            # Nothing is permuted or padded: two copies do.
            num_parameters, num_statistics = self.widths
            yield rows[:, :num_parameters], parameters
            if num_statistics:
                yield rows[:, num_parameters:], statistics
            return
        for plain, e in zip(self.plain.entries, self.entries, strict=True):
            columns = rows[:, plain.start : plain.stop]
            matrix = parameters if e.trainable else statistics
            yield columns.unflatten(1, plain.shape), self.view(matrix, e)
