"""Signs of life that the ranks of a role leave in their store: those who wait for a
rank can tell which it is.

The store lives in the role's rank 0. When that one is halted, calls of the store block
for ever, whatever their timeout says; so they are made in threads that nobody waits
for.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from hpcfed.runtime.awake import Awake

ANSWER = 2.0
"""Seconds that the rank with the store may take to answer."""
PAUSE = 0.25
"""Seconds between two looks at the clock while waiting for signs of life."""


class Pulse:
    """One rank's end."""

    def __init__(self, host: str, port: int, *, rank: int, size: int) -> None:
        self._address, self._rank, self._size = (host, port), rank, size

    @contextmanager
    def beating(self, seconds: float) -> Iterator[None]:
        """Within, a thread leaves a sign of life every so many seconds."""
        over = threading.Event()
        threading.Thread(
            target=self._beat, args=(seconds, over), name="pulse", daemon=True
        ).start()
        try:
            yield
        finally:
            over.set()

    def silent(self, seconds: float) -> list[int]:
        """Looks for so long, and returns the ranks that leave no sign of life
        meanwhile.

        Rank 0 is the answer when the store does not answer; nobody is when it has gone,
        since then rank 0 has ended. While this rank is suspended it does not look:
        others may be suspended with it.
        """
        found: list[list[int]] = []
        looking = threading.Thread(
            target=lambda: found.append(self._look(seconds)), name="silent", daemon=True
        )
        looking.start()
        awake = Awake(PAUSE)
        while looking.is_alive() and awake.look() < seconds + 2 * ANSWER:
            looking.join(PAUSE)
        return found[0] if found else [0]

    def _beat(self, seconds: float, over: threading.Event) -> None:
        beats, store = 0, None
        while not over.is_set():
            beats += 1
            try:
                store = store or self._connected()
                store.set(f"pulse/{self._rank}", str(beats))
            except RuntimeError:  # it is slow to start, or has gone and with it the run
                store = None
            over.wait(seconds)

    def _look(self, seconds: float) -> list[int]:
        try:
            store = self._connected()
            before = self._signs(store)
            awake = Awake(PAUSE)
            while awake.look() < seconds:
                time.sleep(PAUSE)
            after = self._signs(store)
        except RuntimeError:
            return []
        return [rank for rank in range(self._size) if before[rank] == after[rank]]

    def _signs(self, store: dist.TCPStore) -> list[bytes]:
        """The last sign of every rank, empty for one that has left none."""
        names = [f"pulse/{rank}" for rank in range(self._size)]
        return [store.get(name) if store.check([name]) else b"" for name in names]

    def _connected(self) -> dist.TCPStore:
        """Opens a connection of its own, because a call that blocks would block all
        others on it.
        """
        timeout = timedelta(seconds=ANSWER)
        return dist.TCPStore(
            *self._address, is_master=False, wait_for_workers=False, timeout=timeout
        )
