"""Signs of life that the ranks of a role leave in their store: those who wait for a rank can tell which it is."""

import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

_ANSWER = timedelta(seconds=2)
"""How long the rank that keeps the store may take to answer."""


class Pulse:
    """One rank's end. It has a connection of its own, because it is used in a thread beside the collectives."""

    def __init__(self, host: str, port: int, *, rank: int, size: int) -> None:
        self._address, self._rank, self._size = (host, port), rank, size
        self._store: dist.TCPStore | None = None
        self._beats = 0

    def beat(self) -> None:
        """Leaves a sign of life; nothing where the store does not answer, which `silent` will tell."""
        self._beats += 1
        with suppress(RuntimeError):
            self._connected().set(f"pulse/{self._rank}", str(self._beats))

    def silent(self, *, seconds: float) -> list[int]:
        """Looks for so long, and returns the ranks that leave no sign of life meanwhile."""
        before = self._signs()
        if before is None:
            return [0]  # which keeps the store
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.beat()
            time.sleep(seconds / 4)
        after = self._signs()
        if after is None:
            return [0]
        return [rank for rank in range(self._size) if before[rank] == after[rank]]

    def _signs(self) -> list[bytes] | None:
        """The last sign of every rank, empty for one that has left none; None where the store does not answer."""
        names = [f"pulse/{rank}" for rank in range(self._size)]
        try:
            store = self._connected()
            return [store.get(name) if store.check([name]) else b"" for name in names]
        except RuntimeError:
            return None

    def _connected(self) -> dist.TCPStore:
        if self._store is None:
            host, port = self._address
            self._store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_ANSWER)
        return self._store
