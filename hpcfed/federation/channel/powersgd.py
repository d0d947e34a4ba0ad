"""PowerSGD (Vogels et al. 2019): each matrix of an update as two thin factors.

Algorithm 1, for every client separately: P = M Q, orthonormal columns P̂ of P, Q = Mᵀ
P̂. P̂ and Q are sent, and M arrives as P̂ Qᵀ, the projection of M on the columns of P̂.
Each client starts from its previous Q: one step of power iteration per upload. A
convolution is a matrix with a row per output channel. Vectors are sent as they are, and
so are matrices whose factors would be larger.

A column of Q that is 0, as all are before the first upload, is drawn at random.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from hpcfed.errors import UserError
from hpcfed.federation.channel.compressors import Packed, Updates
from hpcfed.models.layout import Entry
from hpcfed.runtime import randomness


class _Matrix(NamedTuple):
    """A tensor that is sent as two factors."""

    columns: slice
    """Its columns of a row."""
    height: int
    width: int
    kept: slice
    """The columns of its Q within what a client keeps."""


@dataclass(frozen=True)
class PowerSGD:
    entries: Sequence[Entry]
    """The tensors that the columns hold."""
    rank: int

    def __post_init__(self) -> None:
        if not any(self._matrices()):
            raise UserError(
                f"PowerSGD: factors of rank {self.rank} are larger than the network's "
                "matrices; use a smaller --compress-rank, or --compress topk"
            )

    def warm_columns(self, columns: int) -> int:
        """Return how many numbers the Q of all matrices have. Refuse rows that leave
        out columns, since no matrix can be found in them.
        """
        whole = self.entries[-1].stop
        if columns != whole:
            raise UserError(
                f"PowerSGD needs whole rows, and this method sends {columns:,} of "
                f"{whole:,} columns; use --compress topk"
            )
        *_, last = self._matrices()
        return last.kept.stop

    def __call__(self, updates: Updates) -> Packed:
        rows, before = updates.values, updates.warm
        assert before is not None
        number = rows.element_size()
        drawn = randomness.uniform(updates.keys, before.shape[1])
        # Centred at 0: the columns of positive matrices are nearly parallel.
        drawn = drawn.to(rows.dtype) - 0.5
        values, warm = rows.clone(), before.clone()
        size = updates.num_sent() * number
        for matrix in self._matrices():
            columns, kept = matrix.columns, matrix.kept
            approximation, q = low_rank(
                rows[:, columns].unflatten(1, (matrix.height, matrix.width)),
                before[:, kept].unflatten(1, (matrix.width, self.rank)),
                drawn[:, kept].unflatten(1, (matrix.width, self.rank)),
            )
            arrived, q = approximation.flatten(1), q.flatten(1)
            factors = (matrix.height + matrix.width) * self.rank * number
            if updates.sent is None:
                values[:, columns], warm[:, kept] = arrived, q
                size += factors - arrived.shape[1] * number
                continue
            sent = updates.sent[:, columns]
            dense = sent.sum(1) * number
            # A member that sends few columns of a matrix, or none, sends them unpacked.
            packs = dense > factors
            at_all = packs[:, None]
            values[:, columns] = arrived.where(sent & at_all, rows[:, columns])
            warm[:, kept] = q.where(at_all, before[:, kept])
            size += packs * (factors - dense)
        return Packed(values, size, warm)

    def _matrices(self) -> Iterator[_Matrix]:
        first = 0
        for entry in self.entries:
            if not entry.is_matrix:
                continue
            height, width = entry.shape[0], prod(entry.shape[1:])
            if (height + width) * self.rank < height * width:
                kept = slice(first, first + self.rank * width)
                yield _Matrix(slice(entry.start, entry.stop), height, width, kept)
                first = kept.stop


def low_rank(matrix: Tensor, warm: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """Return P̂ Qᵀ and Q of each member's matrix, [members, height, width].

    `warm` and `drawn` are [members, width, rank].
    """
    alive = warm.abs().sum(1, keepdim=True) > 0
    q = warm.where(alive, drawn)
    p = orthonormal(matrix @ q)
    q = matrix.mT @ p
    return p @ q.mT, q


def orthonormal(columns: Tensor) -> Tensor:
    """Return orthonormal columns by Gram-Schmidt. A column that depends on those before
    it becomes 0.

    It takes a few operations for all members: a GPU would factorise them one by one.
    """
    least = 100 * torch.finfo(columns.dtype).eps
    basis = columns[:, :, :0]
    for column in columns.split(1, dim=2):
        before = torch.linalg.vector_norm(column, dim=1, keepdim=True)
        # Twice: after one pass, rounding errors are as large as what is left of a
        # dependent column.
        for _ in range(2):
            # Not as matrix products: a CPU would start one for each member.
            shares = (basis * column).sum(1, keepdim=True)
            column = column - (basis * shares).sum(2, keepdim=True)
        length = torch.linalg.vector_norm(column, dim=1, keepdim=True)
        independent = length > least * before
        # A comparison with NaN is False, but a diverged client must stay visible.
        unit = (column / length).where(independent | length.isnan(), 0)
        basis = torch.cat([basis, unit], 2)
    return basis
