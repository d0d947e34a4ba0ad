"""Messages between workers and the server's first rank, over MPI: a small header, and
rows in a separate buffer.

A sender continues immediately. A receiver (the server for requests, a worker for an
answer) sleeps between polls, so that ranks with work get the cores: MPI's own blocking
calls spin.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcfed.runtime.mpi import pieces_of
from hpcfed.runtime.world import World

_HEADER, _ROWS, _URGE = 71, 72, 73
"""MPI tags: of the two halves of a message, and of the word that the run is to stop."""
_FIRST_PAUSE, _LONGEST_PAUSE = 2e-5, 2e-3
"""Seconds between two polls for a message; the pause doubles while nothing arrives."""


@dataclass
class _Sent:
    requests: list[Any]
    buffer: np.ndarray | None
    """Must stay alive and unchanged until MPI has sent it."""

    def complete(self) -> bool:
        return all(request.Test() for request in self.requests)


class Link:
    """One end of the link: a worker, or the server's first rank."""

    def __init__(self, world: World) -> None:
        # All ranks, because workers and server ranks share no other communicator.
        self._comm = world.comm
        self._in_flight: list[_Sent] = []
        self._urged = False

    def urge(self, to: int) -> None:
        """Tell a rank that is at work that the run is to stop."""
        self._in_flight.append(
            _Sent([self._comm.isend(None, dest=to, tag=_URGE)], None)
        )

    def is_urged(self) -> bool:
        """Tell whether any rank has said so."""
        while self._comm.Iprobe(tag=_URGE):
            self._comm.recv(tag=_URGE)
            self._urged = True
        return self._urged

    def send(self, to: int, header: Any, rows: Tensor | None = None) -> None:
        """Send a message and return immediately; the rows may change afterwards."""
        self._in_flight = [sent for sent in self._in_flight if not sent.complete()]
        buffer = None if rows is None else _on_host(rows)
        shape = None if buffer is None else (buffer.shape, buffer.dtype.str)
        requests = [self._comm.isend((header, shape), dest=to, tag=_HEADER)]
        # For empty rows, [0, columns], the shape in the header is enough.
        if buffer is not None:
            for piece in pieces_of(buffer):
                requests.append(self._comm.Isend(piece, dest=to, tag=_ROWS))
        self._in_flight.append(_Sent(requests, buffer))

    def receive(
        self, source: int, *, meanwhile: Callable[[], None] = lambda: None
    ) -> tuple[Any, np.ndarray | None]:
        """Wait for the next message of this rank; call `meanwhile` again and again."""
        self._wait_for_header(source, meanwhile)
        header, shape = self._comm.recv(source=source, tag=_HEADER)
        if shape is None:
            return header, None
        rows = np.empty(shape[0], np.dtype(shape[1]))
        # MPI keeps messages with the same rank and tag in order: these rows belong to
        # the header.
        for piece in pieces_of(rows):
            self._comm.Recv(piece, source=source, tag=_ROWS)
        return header, rows

    def flush(self) -> None:
        """Wait until everything has been sent."""
        for sent in self._in_flight:
            for request in sent.requests:
                request.Wait()
        self._in_flight = []

    def _wait_for_header(self, source: int, meanwhile: Callable[[], None]) -> None:
        pause = _FIRST_PAUSE
        while not self._comm.Iprobe(source=source, tag=_HEADER):
            meanwhile()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def _on_host(rows: Tensor) -> np.ndarray:
    """Return a copy in host memory; pinned if it comes from a GPU, which is faster."""
    if rows.device.type == "cpu":
        array: np.ndarray = rows.contiguous().numpy().copy()
        return array
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    host.copy_(rows)
    return host.numpy()
