"""Rows laid out for the kernels, while a stack of clients trains or is evaluated."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from hpcfed.kernels import rows as row_kernels
from hpcfed.models.layout import Entry, Layout, block_spans
from hpcfed.runtime.accelerator import is_gpu

ALIGNMENT = 4
"""Floats: a kernel loads 16 bytes at once, from a multiple of 16."""
LARGE = 2**14
"""A tensor with at least this many columns begins at a multiple of `LINE`."""
LINE = 32
"""Floats of a cache line. A warp that reads across its end reads two lines."""

KernelRows = tuple[Tensor, Tensor]
"""Parameters and running statistics of some clients, a matrix each."""


class KernelLayout:
    """The columns of rows in the order that the kernels need.

    Parameters and running statistics are two matrices. On a GPU every tensor is
    aligned, and weights of convolutions are channels-last. There may be padding columns
    between tensors. They are zero at first, and stay zero as long as a row is finite.
    On the CPU tensors are laid out as in the plain rows.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.plain = layout
        self._channels_last = is_gpu(device)
        self.widths = [0, 0]
        """Columns of the two matrices."""
        self.entries = []
        widest = [1, 1]
        for e in layout.entries:
            matrix = 0 if e.trainable else 1
            columns = prod(e.shape)
            alignment = self._alignment(columns)
            # The current end of the matrix, rounded up.
            start = _rounded_up(self.widths[matrix], alignment)
            self.entries.append(replace(e, start=start, stop=start + columns))
            self.widths[matrix] = start + columns
            widest[matrix] = max(widest[matrix], alignment)
        # The next row begins where this one ends.
        for matrix, alignment in enumerate(widest):
            self.widths[matrix] = _rounded_up(self.widths[matrix], alignment)
        self._tables: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def _alignment(self, columns: int) -> int:
        """Return the alignment of a tensor's first column."""
        if not self._channels_last:
            return 1
        return LINE if columns >= LARGE else ALIGNMENT

    def clear_padding(self, parameters: Tensor) -> None:
        """Set the columns between parameters to zero."""
        end = 0
        for e in self.entries:
            if not e.trainable:
                continue
            if e.start > end:
                parameters[:, end : e.start] = 0
            end = e.stop
        if end < self.widths[0]:
            parameters[:, end:] = 0

    @property
    def block_spans(self) -> list[tuple[int, int]]:
        """Start and stop of each block here, including padding columns after it."""
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
            # Stored with inputs last; the view has torch's order of dimensions.
            outputs, inputs, height, width = e.shape
            stored = columns.unflatten(1, (outputs, height, width, inputs))
            return stored.permute(0, 1, 4, 2, 3)
        return e.shaped(columns)

    def views(self, parameters: Tensor, statistics: Tensor) -> dict[str, Tensor]:
        """Return every tensor by name."""
        named = {}
        for e in self.entries:
            matrix = parameters if e.trainable else statistics
            named[e.name] = self.view(matrix, e)
        return named

    def load(self, rows: Tensor, kernel_rows: KernelRows) -> None:
        """Copy plain rows into the two matrices; padding columns become zero."""
        if self._serves(rows, kernel_rows):
            to_parameters, to_statistics, _, _ = self._places(rows.device)
            parameters, statistics = kernel_rows
            row_kernels.fill(rows, parameters, to_parameters)
            if statistics.shape[1]:
                row_kernels.fill(rows, statistics, to_statistics)
            return
        self.clear_padding(kernel_rows[0])
        for plain, laid_out in self._pairs(rows, *kernel_rows):
            laid_out.copy_(plain)

    def store(self, kernel_rows: KernelRows, rows: Tensor) -> None:
        """Copy the two matrices into plain rows."""
        if self._serves(rows, kernel_rows):
            _, _, from_parameters, from_statistics = self._places(rows.device)
            parameters, statistics = kernel_rows
            row_kernels.set_columns(parameters, rows, from_parameters)
            # `set_columns` leaves the other columns of the rows alone, so two calls
            # fill them all.
            if statistics.shape[1]:
                row_kernels.set_columns(statistics, rows, from_statistics)
            return
        for plain, laid_out in self._pairs(rows, *kernel_rows):
            plain.copy_(laid_out)

    def _serves(self, rows: Tensor, kernel_rows: KernelRows) -> bool:
        """Whether one pass over the rows can copy them."""
        # Both matrices are of one kind.
        return self._channels_last and row_kernels.serves(rows, kernel_rows[0])

    def _places(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return where both matrices' columns are in plain rows, and the inverse."""
        if self._tables is None:
            like = torch.zeros((), dtype=torch.int32, device=device)
            # Number the columns, and lay the numbers out like any row.
            numbers = torch.arange(self.plain.num_columns, device=device)
            matrices = [like.new_full((1, width), -1) for width in self.widths]
            for plain, laid_out in self._pairs(numbers.int()[None], *matrices):
                laid_out.copy_(plain)
            tables = []
            for matrix in matrices:
                # Entry j is the plain column that ends up at place j; -1 where padding
                # is.
                table = matrix[0]
                inverse = like.new_full((self.plain.num_columns,), -1)
                places = torch.nonzero(table >= 0).flatten()
                inverse[table[places].long()] = places.int()
                tables.append((table, inverse))
            (to_parameters, of_parameters), (to_statistics, of_statistics) = tables
            self._tables = to_parameters, to_statistics, of_parameters, of_statistics
        return self._tables

    def _pairs(
        self, rows: Tensor, parameters: Tensor, statistics: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of the same columns in plain rows and here."""
        if not self._channels_last:
            # Nothing is permuted or padded: two copies are enough.
            num_parameters, num_statistics = self.widths
            yield rows[:, :num_parameters], parameters
            if num_statistics:
                yield rows[:, num_parameters:], statistics
            return
        for plain, e in zip(self.plain.entries, self.entries, strict=True):
            columns = rows[:, plain.start : plain.stop]
            matrix = parameters if e.trainable else statistics
            yield plain.shaped(columns), self.view(matrix, e)


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
