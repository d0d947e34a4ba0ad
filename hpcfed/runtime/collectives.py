"""Collectives among the ranks of a role. Every payload's bytes are counted."""

from collections.abc import Callable
from functools import wraps
from math import ceil, prod
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hpcfed.runtime.world import World

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
Turn = Callable[[Callable[[], Any]], Any]
"""Calls the function when its turn has come, and returns what it returns."""


def _in_turn(collective: F) -> F:
    """No collective may call another: it would wait for its turn within its turn."""

    @wraps(collective)
    def due(self: "Collectives", *arguments: Any) -> Any:
        return self._turn(lambda: collective(self, *arguments))

    return cast(F, due)


class Collectives:
    """Sums and exchanges of rows between workers; with a single worker each is the
    identity.

    All ranks must call their collectives in the same order; where several programs
    share a rank, `turn` sees to that.
    """

    def __init__(
        self, world: World, *, turn: Turn = lambda collective: collective()
    ) -> None:
        self.world = world
        self._turn = turn
        self.bytes_sent = 0
        """Payload that this rank handed to collectives so far."""

    @property
    def size(self) -> int:
        return self.world.role_size

    @_in_turn
    def allreduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, on every rank; may overwrite its argument."""
        if self.size == 1:
            return tensor
        buffer = self._outgoing(tensor)
        dist.all_reduce(buffer)
        return buffer.to(tensor.device)

    @_in_turn
    def rows_to_columns(self, rows: Tensor, counts: list[int]) -> Tensor:
        """From whole rows of our own to our share of the columns of everyone's rows:
        [sum(counts), share].

        `counts` are the numbers of rows of all ranks, in rank order, which is also the
        order of the result.
        """
        if self.size == 1:
            return rows
        width = ceil(rows.shape[1] / self.size)
        shares = rows.new_zeros(
            self.size, len(rows), width
        )  # the last is short, and padded
        for share, part in zip(shares, rows.split(width, dim=1), strict=False):
            share[:, : part.shape[1]] = part
        outgoing = self._outgoing(shares)
        incoming = outgoing.new_empty(sum(counts), width)
        splits = [len(rows)] * self.size
        dist.all_to_all_single(
            incoming,
            outgoing.view(-1, width),
            output_split_sizes=counts,
            input_split_sizes=splits,
        )
        return incoming.to(rows.device)

    @_in_turn
    def columns_to_row(self, columns: Tensor, num_columns: int) -> Tensor:
        """From every rank's share of one row [share] to the whole row, on every rank."""
        if self.size == 1:
            return columns
        outgoing = self._outgoing(columns.contiguous())
        whole = outgoing.new_empty(self.size * len(columns))
        dist.all_gather_into_tensor(whole, outgoing)
        return whole[:num_columns].to(columns.device)

    @_in_turn
    def relocate(self, rows: Tensor, before: np.ndarray, after: np.ndarray) -> Tensor:
        """From one entry per client that was ours to one per client that is, bit for
        bit; ids ascend in both.

        `before` and `after` are the ranks of all clients. Only entries that change
        ranks are sent.
        """
        own, ranks = self.world.role_rank, range(self.size)
        old, new = np.flatnonzero(before == own), np.flatnonzero(after == own)
        leaving = [
            np.flatnonzero((before == own) & (after == rank) & (rank != own))
            for rank in ranks
        ]
        coming = [
            np.flatnonzero((before == rank) & (after == own) & (rank != own))
            for rank in ranks
        ]
        result = rows.new_empty(len(new), *rows.shape[1:])
        staying = np.intersect1d(old, new, assume_unique=True)
        result[np.searchsorted(new, staying)] = rows[np.searchsorted(old, staying)]
        width = prod(rows.shape[1:])
        if self.size == 1 or not width:
            return result
        outgoing = self._outgoing(rows[np.searchsorted(old, np.concatenate(leaving))])
        as_bytes = outgoing.reshape(len(outgoing), width).view(
            torch.uint8
        )  # gloo knows few types
        incoming = as_bytes.new_empty(sum(map(len, coming)), as_bytes.shape[1])
        dist.all_to_all_single(
            incoming,
            as_bytes,
            output_split_sizes=[len(clients) for clients in coming],
            input_split_sizes=[len(clients) for clients in leaving],
        )
        arrived = incoming.view(rows.dtype).reshape(len(incoming), *rows.shape[1:])
        result[np.searchsorted(new, np.concatenate(coming))] = arrived.to(rows.device)
        return result

    @_in_turn
    def bcast(self, value: Any) -> Any:
        """The value of the role's first rank, on every rank of the role."""
        return (
            value
            if self.world.role_comm is None
            else self.world.role_comm.bcast(value, root=0)
        )

    @_in_turn
    def gather(self, value: T) -> list[T] | None:
        """Every worker's small value on the role's first rank; None elsewhere."""
        if self.world.role_comm is None:
            return [value]
        gathered: list[T] | None = self.world.role_comm.gather(value, root=0)
        return gathered

    @_in_turn
    def any_rank(self, here: bool) -> bool:
        """Whether it is so on some rank; the same answer everywhere."""
        return (
            here
            if self.world.role_comm is None
            else any(self.world.role_comm.allgather(here))
        )

    @_in_turn
    def allgather(self, value: T) -> list[T]:
        """Every worker's small value, on every worker, in rank order."""
        return (
            [value]
            if self.world.role_comm is None
            else list(self.world.role_comm.allgather(value))
        )

    @_in_turn
    def gather_vectors(self, numbers: np.ndarray) -> np.ndarray | None:
        """Every worker's vector of float64 as [ranks, numbers] on the role's first
        rank; None elsewhere.
        """
        if self.world.role_comm is None:
            return numbers[None]
        gathered = (
            np.empty((self.size, len(numbers))) if self.world.role_rank == 0 else None
        )
        self.world.role_comm.Gather(
            np.ascontiguousarray(numbers, np.float64), gathered, root=0
        )
        return gathered

    def allgather_rows(
        self, value: Any, rows: Tensor | None
    ) -> list[tuple[Any, Tensor | None]]:
        """Every rank's small value and rows, on every rank, in rank order; rows have
        the same columns everywhere.

        To be called `in_turn`.
        """
        if self.world.role_comm is None or self.size == 1:
            return [(value, rows)]
        values = self.world.role_comm.allgather(
            (value, None if rows is None else len(rows))
        )
        if rows is None:
            return [(other, None) for other, _ in values]
        counts = [count for _, count in values]
        outgoing = self._outgoing(rows.contiguous())
        whole = outgoing.new_empty(sum(counts), rows.shape[1])
        parts = list(whole.split(counts))
        dist.all_gather(parts, outgoing) if len(set(counts)) == 1 else _gather_unequal(
            parts, outgoing
        )
        return [
            (other, part.to(rows.device))
            for (other, _), part in zip(values, parts, strict=True)
        ]

    def in_turn(self, work: Callable[[], T]) -> T:
        """Work with collectives of its own, such as a library's."""
        answer: T = self._turn(work)
        return answer

    @_in_turn
    def barrier(self) -> None:
        if self.world.role_comm is not None:
            self.world.role_comm.Barrier()

    def _outgoing(self, tensor: Tensor) -> Tensor:
        """Counts the payload, and moves it to where the backend can read it: gloo wants
        host memory.
        """
        self.bytes_sent += tensor.numel() * tensor.element_size()
        return tensor.cpu() if self.world.backend == "gloo" else tensor


def _gather_unequal(parts: list[Tensor], own: Tensor) -> None:
    """Every rank's rows, of which there are different numbers, into their parts."""
    for rank, part in enumerate(parts):
        if part.numel():
            if rank == dist.get_rank():
                part.copy_(own)
            dist.broadcast(part, rank)
