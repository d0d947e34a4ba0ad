"""Messages between workers and the server's first rank, over MPI: a small header, and
rows in a buffer of their own.

A worker's message leaves while it goes on; the server, and a worker that waits for an
answer, sleep between looks, so that whoever has work gets the cores.
"""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcfed.runtime.world import World

_HEADER, _ROWS = 71, 72  # tags
_FIRST_LOOK, _LONGEST_PAUSE = 2e-5, 2e-3
"""Seconds between two looks for a message; the pause doubles while nothing comes."""


@dataclass
class _Sent:
    requests: list[Any]
    buffer: np.ndarray | None
    """Must stay as it is until MPI has sent it."""

    def gone(self) -> bool:
        return all(request.Test() for request in self.requests)


class Link:
    """One end: a worker's, or that of the server's first rank."""

    def __init__(self, world: World) -> None:
        self._comm = world.comm
        self._on_the_way: list[_Sent] = []

    def send(self, to: int, header: Any, rows: Tensor | None = None) -> None:
        """Returns at once; the rows may change afterwards."""
        self._on_the_way = [sent for sent in self._on_the_way if not sent.gone()]
        buffer = None if rows is None else _on_host(rows)
        shape = None if buffer is None else (buffer.shape, buffer.dtype.str)
        requests = [self._comm.isend((header, shape), dest=to, tag=_HEADER)]
        if buffer is not None and buffer.size:
            requests.append(self._comm.Isend(buffer, dest=to, tag=_ROWS))
        self._on_the_way.append(_Sent(requests, buffer))

    def receive(self, source: int) -> tuple[Any, np.ndarray | None]:
        """Waits for the next message of this rank."""
        self._await(source)
        header, shape = self._comm.recv(source=source, tag=_HEADER)
        if shape is None:
            return header, None
        rows = np.empty(shape[0], np.dtype(shape[1]))
        if rows.size:
            self._comm.Recv(rows, source=source, tag=_ROWS)
        return header, rows

    def flush(self) -> None:
        """Waits until everything has been sent."""
        for sent in self._on_the_way:
            for request in sent.requests:
                request.Wait()
        self._on_the_way = []

    def _await(self, source: int) -> None:
        pause = _FIRST_LOOK
        while not self._comm.Iprobe(source=source, tag=_HEADER):
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def _on_host(rows: Tensor) -> np.ndarray:
    if rows.device.type == "cpu":
        array: np.ndarray = rows.contiguous().numpy().copy()
        return array
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    host.copy_(rows)
    return host.numpy()
