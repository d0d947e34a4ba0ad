"""Collectives among the ranks of this rank's role. The bytes of rows are counted; those
of small values are not.
"""

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
"""Calls the function when it is its turn, and returns the result."""


def _in_turn(collective: F) -> F:
    """Make a method wait for its turn.

    No collective may call another one: it would wait for a turn within its own turn.
    """

    @wraps(collective)
    def due(self: "Collectives", *arguments: Any) -> Any:
        return self._turn(lambda: collective(self, *arguments))

    return cast(F, due)


class Collectives:
    """Sums and exchanges of rows and values among the ranks of this rank's role.

    With a single rank each is the identity. All ranks must call their collectives in
    the same order. If several programs share a rank, as the stacked seeds of a run do,
    `turn` ensures that, and `meet` waits until all of them call it, and counts them.

    Rows go through torch.distributed, which keeps them on GPUs if it can. Small values
    go through MPI, which takes any object.
    """

    def __init__(
        self,
        world: World,
        *,
        turn: Turn = lambda collective: collective(),
        meet: Callable[[], int] = lambda: 1,
    ) -> None:
        self.world = world
        self.meet = meet
        self._turn = turn
        self.bytes_sent = 0
        """Payload that this rank has handed to collectives so far."""

    @property
    def size(self) -> int:
        """How many ranks take part."""
        return self.world.role_size

    @_in_turn
    def allreduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks, on every rank; may overwrite its argument."""
        if self.size == 1:
            return tensor
        buffer = self._outgoing(tensor)
        dist.all_reduce(buffer)
        # With NCCL the buffer is the caller's tensor, changed in place.
        return buffer.to(tensor.device)

    @_in_turn
    def rows_to_columns(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Exchange this rank's rows, with all columns, for its share of the columns of
        all rows: [sum(counts), share].

        `counts` are the numbers of rows of all ranks, in rank order. The result is in
        the same order. `columns_to_row` is the inverse.
        """
        if self.size == 1:
            return rows
        width = ceil(rows.shape[1] / self.size)
        # all_to_all needs shares of equal width, so the last one is padded with zeros.
        # If there are more ranks than columns, further shares are all padding.
        shares = rows.new_zeros(self.size, len(rows), width)
        # Not strict: there may be fewer pieces than ranks.
        for share, columns in zip(shares, rows.split(width, dim=1), strict=False):
            share[:, : columns.shape[1]] = columns
        outgoing = self._outgoing(shares)
        incoming = outgoing.new_empty(sum(counts), width)
        dist.all_to_all_single(
            incoming,
            outgoing.view(-1, width),
            output_split_sizes=counts,
            input_split_sizes=[len(rows)] * self.size,
        )
        return incoming.to(rows.device)

    @_in_turn
    def columns_to_row(self, columns: Tensor, num_columns: int) -> Tensor:
        """Join every rank's share of one row [share] into a row, on every rank."""
        if self.size == 1:
            return columns
        outgoing = self._outgoing(columns.contiguous())
        whole = outgoing.new_empty(self.size * len(columns))
        dist.all_gather_into_tensor(whole, outgoing)
        # The padding of rows_to_columns is at the end.
        return whole[:num_columns].to(columns.device)

    @_in_turn
    def relocate(self, rows: Tensor, before: np.ndarray, after: np.ndarray) -> Tensor:
        """Exchange one entry per client that was on this rank for one per client that
        is now, bit for bit.

        `before` and `after` are the ranks of all clients. A rank's entries are in the
        order of client ids, before and after. Only entries that change ranks are sent.
        """
        here = self.world.role_rank
        old, new = np.flatnonzero(before == here), np.flatnonzero(after == here)
        result = rows.new_empty(len(new), *rows.shape[1:])
        staying = np.intersect1d(old, new, assume_unique=True)
        result[np.searchsorted(new, staying)] = rows[np.searchsorted(old, staying)]
        width = prod(rows.shape[1:])
        if self.size == 1 or not width:
            return result
        leaving, arriving = [], []
        for rank in range(self.size):
            # What stays was copied above, and must not be sent to itself.
            elsewhere = rank != here
            out = (before == here) & (after == rank) & elsewhere
            into = (before == rank) & (after == here) & elsewhere
            leaving.append(np.flatnonzero(out))
            arriving.append(np.flatnonzero(into))
        outgoing = self._outgoing(rows[np.searchsorted(old, np.concatenate(leaving))])
        # As bytes, because gloo supports few types.
        as_bytes = outgoing.reshape(len(outgoing), width).view(torch.uint8)
        num_out = [len(clients) for clients in leaving]
        num_in = [len(clients) for clients in arriving]
        incoming = as_bytes.new_empty(sum(num_in), as_bytes.shape[1])
        dist.all_to_all_single(
            incoming, as_bytes, output_split_sizes=num_in, input_split_sizes=num_out
        )
        arrived = incoming.view(rows.dtype).reshape(len(incoming), *rows.shape[1:])
        # Entries come rank by rank, each in the order of ids, as `arriving` lists them.
        slots = np.searchsorted(new, np.concatenate(arriving))
        result[slots] = arrived.to(rows.device)
        return result

    @_in_turn
    def bcast(self, value: Any) -> Any:
        """Return the value of the role's first rank, on every rank of the role."""
        return self.world.role_bcast(value)

    @_in_turn
    def gather(self, value: T) -> list[T] | None:
        """Return every rank's small value on the role's first rank; None elsewhere."""
        if self.world.role_comm is None:
            return [value]
        gathered: list[T] | None = self.world.role_comm.gather(value, root=0)
        return gathered

    @_in_turn
    def any_rank(self, here: bool) -> bool:
        """Return whether `here` is true on some rank; the same answer on every rank."""
        return any(self.world.role_allgather(here))

    @_in_turn
    def allgather(self, value: T) -> list[T]:
        """Return every rank's small value, on every rank, in rank order."""
        return self.world.role_allgather(value)

    @_in_turn
    def gather_vectors(self, numbers: np.ndarray) -> np.ndarray | None:
        """Return all float64 vectors as [ranks, numbers] on the root, else None."""
        if self.world.role_comm is None:
            return numbers[None]
        gathered = None
        if self.world.role_rank == 0:
            gathered = np.empty((self.size, len(numbers)))
        # Gather with a capital G sends buffers, without pickling or converting.
        vector = np.ascontiguousarray(numbers, np.float64)
        self.world.role_comm.Gather(vector, gathered, root=0)
        return gathered

    def allgather_rows(
        self, value: Any, rows: Tensor | None
    ) -> list[tuple[Any, Tensor | None]]:
        """Return every rank's small value and rows, on every rank, in rank order.

        Rows have the same columns on all ranks, or are None on all. It takes no turn
        itself: call it within `in_turn`.
        """
        if self.world.role_comm is None or self.size == 1:
            return [(value, rows)]
        num_rows = None if rows is None else len(rows)
        gathered = self.world.role_comm.allgather((value, num_rows))
        if rows is None:
            return [(other, None) for other, _ in gathered]
        values = [other for other, _ in gathered]
        counts = [count for _, count in gathered]
        outgoing = self._outgoing(rows.contiguous())
        whole = outgoing.new_empty(sum(counts), rows.shape[1])
        by_rank = list(whole.split(counts))
        if len(set(counts)) == 1:
            dist.all_gather(by_rank, outgoing)
        else:
            _allgather_unequal(by_rank, outgoing)
        there = [others.to(rows.device) for others in by_rank]
        return list(zip(values, there, strict=True))

    def in_turn(self, work: Callable[[], T]) -> T:
        """Do work that makes its own collective calls, in one turn."""
        answer: T = self._turn(work)
        return answer

    @_in_turn
    def barrier(self) -> None:
        """Wait until every rank of the role is here."""
        self.world.role_barrier()

    def _outgoing(self, tensor: Tensor) -> Tensor:
        """Count the payload, and return it where the backend reads it."""
        self.bytes_sent += tensor.numel() * tensor.element_size()
        return tensor.cpu() if self.world.backend == "gloo" else tensor


def _allgather_unequal(by_rank: list[Tensor], rows: Tensor) -> None:
    """Fill `by_rank` with every rank's rows, whose numbers differ.

    all_gather is for equal shapes, so each rank broadcasts its own.
    """
    for rank, target in enumerate(by_rank):
        # Every rank skips the same ones: all know all counts.
        if not target.numel():
            continue
        if rank == dist.get_rank():
            target.copy_(rows)
        dist.broadcast(target, rank)
