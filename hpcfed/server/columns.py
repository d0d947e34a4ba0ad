"""Which of the generated columns a server rank holds.

The bank lies once over all server ranks: each has a share of the columns of every row.
What is summed over columns is summed over ranks afterwards. Only --server-model p-diff
needs whole rows, so that every rank holds all columns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from hpcfed.runtime import process_group


@dataclass(frozen=True)
class Columns:
    """This rank's columns, from `start` to `stop`, of all generated tensors."""

    widths: tuple[int, ...]
    """Columns of each generated tensor, in order."""
    start: int
    stop: int
    ranks: int = 1
    """How many ranks share the columns."""

    @classmethod
    def all_of(cls, widths: Sequence[int]) -> "Columns":
        """Return all columns of tensors with these numbers of columns."""
        return cls(tuple(widths), 0, sum(widths))

    @classmethod
    def share_of(cls, widths: Sequence[int], rank: int, ranks: int) -> "Columns":
        """Return the share of one of several ranks; shares differ by one column."""
        total = sum(widths)
        start, stop = rank * total // ranks, (rank + 1) * total // ranks
        return cls(tuple(widths), start, stop, ranks)

    @property
    def num_all(self) -> int:
        """The number of columns on all ranks together."""
        return sum(self.widths)

    @property
    def shared(self) -> bool:
        """Whether sums over columns are also sums over ranks."""
        # Not by counting the columns here: a rank may have all of them, and others none,
        # and yet all must join in a sum.
        return self.ranks > 1

    def of(self, rows: Tensor) -> Tensor:
        """Return this rank's columns of whole rows."""
        if not self.shared:
            return rows
        # A copy: a view would keep the whole rows in memory.
        return rows[:, self.start : self.stop].clone()

    def pieces(self) -> Iterator[tuple[int, slice]]:
        """Yield the number of each tensor that has columns here, and which of this
        rank's columns these are.
        """
        begin = 0
        for number, width in enumerate(self.widths):
            first = max(begin, self.start)
            last = min(begin + width, self.stop)
            if first < last:
                yield number, slice(first - self.start, last - self.start)
            begin += width

    def summed(self, here: Tensor) -> Tensor:
        """Return the sum over all columns, given the sum over this rank's."""
        if self.shared:
            process_group.allreduce(here)
        return here

    def whole(self, rows: Tensor) -> Tensor:
        """Return whole rows, given this rank's columns of them."""
        if not self.shared:
            return rows
        shares = []
        for rank in range(self.ranks):
            share = self.share_of(self.widths, rank, self.ranks)
            shares.append(share.stop - share.start)
        return process_group.join_columns(rows, shares)
