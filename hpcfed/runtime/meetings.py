"""Ranks that meet for a limited time: all learn what each has brought, and who is
missing.

MPI's own collectives wait forever for a rank that hangs.
"""

import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_BROUGHT, _LEARNT = 73, 74
"""MPI tags: to the root, and from it."""
_PAUSE = 1e-3
"""Seconds between two polls for a message."""


class Meetings:
    """Meetings of the ranks of a communicator, one after the other."""

    def __init__(self, comm: Any, seconds: float) -> None:
        """`seconds`: how long the root waits for the others; None as communicator: this
        process is alone.
        """
        self._comm = comm
        self._seconds = seconds
        self._sent: list[Any] = []
        """Requests, with the messages that must live until they are complete."""

    def hold(self, value: T) -> dict[int, T]:
        """Return what each rank has brought, on every rank, without those who are
        missing. Then hold no other meeting: the missing ranks may come at any time.

        A rank other than the root waits as long as the root is silent.
        """
        if self._comm is None:
            return {0: value}
        if self._comm.Get_rank() == 0:
            return self._gather(value)
        self._send(value, 0, _BROUGHT)
        while not self._comm.Iprobe(source=0, tag=_LEARNT):
            time.sleep(_PAUSE)
        learnt: dict[int, T] | None = self._comm.recv(source=0, tag=_LEARNT)
        return self._comm.bcast(None, root=0) if learnt is None else learnt

    def _gather(self, value: T) -> dict[int, T]:
        comm, size = self._comm, self._comm.Get_size()
        brought = {0: value}
        missing = set(range(1, size))

        def receive() -> bool:
            for rank in sorted(missing):
                if comm.Iprobe(source=rank, tag=_BROUGHT):
                    brought[rank] = comm.recv(source=rank, tag=_BROUGHT)
                    missing.remove(rank)
            return not missing

        wait_for(receive, self._seconds)
        brought = dict(sorted(brought.items()))
        for rank in range(1, size):
            self._send(brought if missing else None, rank, _LEARNT)
        # All are there, so they can learn it in the quick way.
        return brought if missing else comm.bcast(brought, root=0)

    def _send(self, message: Any, to: int, tag: int) -> None:
        # Not blocking: the receiver may hang. mpi4py keeps the message alive.
        self._sent.append(self._comm.isend(message, dest=to, tag=tag))


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until the condition holds, or so many seconds; return whether it holds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(_PAUSE)
    return True
