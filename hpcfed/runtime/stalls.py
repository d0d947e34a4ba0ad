"""Ends a run whose ranks wait for each other forever. A rank that hangs cannot report
it, so the waiting ranks must.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

# Counting seconds without those during which this process was suspended, for example by
# SIGSTOP or `scontrol suspend`.


Clock = Callable[[], float]


class Awake:
    """Counts seconds, except those during which this process was suspended.

    A process is not told that it was suspended. So the caller must look every `pause`
    seconds: if much more time has passed, the process was suspended. A busy machine
    delays looks, so a gap counts up to twice the pause.
    """

    def __init__(self, pause: float, clock: Clock = time.monotonic) -> None:
        self.pause = pause
        self._clock = clock
        self._last = clock()
        self._seconds = 0.0

    def look(self) -> float:
        """Return the seconds so far."""
        # time.monotonic continues while a process is stopped: that shows as a long gap.
        now = self._clock()
        self._seconds += min(now - self._last, 2 * self.pause)
        self._last = now
        return self._seconds


PATIENCE = {"server": 10}
"""How many times longer than usual a phase may last: in `server`, workers wait while
the server trains its model.
"""
Progress = Callable[[], tuple[int, str]]
"""Returns how often the phase has changed, and its name."""
GiveUp = Callable[[str, float], None]
"""Gets a phase, and how many seconds it has lasted."""


@contextmanager
def ending_stalls(
    progress: Progress, seconds: float, give_up: GiveUp
) -> Iterator[None]:
    """Watch the phases within the block, in a thread.

    When a phase lasts longer than `seconds`, call `give_up` and end the process with
    code 1, whatever it waits for; the launcher then ends the other ranks. Time during
    which this process was suspended does not count. 0 seconds: do not watch.
    """
    if not seconds:
        yield
        return
    over = threading.Event()
    watcher = threading.Thread(
        target=watch,
        args=(progress, seconds, give_up, over),
        name="stalls",
        daemon=True,
    )
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def watch(
    progress: Progress,
    seconds: float,
    give_up: GiveUp,
    over: threading.Event,
    clock: Clock = time.monotonic,
) -> None:
    """Look at the phase again and again until `over`; end the process when it stalls."""
    # Looks often enough that even a short limit is met within an eighth of it.
    awake = Awake(min(1.0, seconds / 8), clock)
    seen, since = progress(), awake.look()
    while not over.wait(awake.pause):
        now, passed = progress(), awake.look()
        if now != seen:
            seen, since = now, passed
            continue
        _, phase = now
        waited = passed - since
        if waited > seconds * PATIENCE.get(phase, 1):
            give_up(phase, waited)
            # sys.exit would end only this thread, and the main thread is stuck in a
            # collective that cannot be interrupted.
            os._exit(1)


# Signs of life that the ranks of a role leave in their store, so that waiting ranks can
# tell which rank they wait for.  The store lives in the role's rank 0. If that rank is
# halted, calls to the store block forever, whatever their timeout. So they are made in
# threads that are never waited for.


ANSWER = 2.0
"""Seconds that the rank with the store may take to answer."""
PAUSE = 0.25
"""Seconds between two looks at the clock while waiting for signs of life."""


class Pulse:
    """One rank's view of the signs of life in its role."""

    def __init__(
        self, host: str, port: int, *, rank: int, size: int, patience: timedelta
    ) -> None:
        """Connect to the store, which may take as long as `patience` to answer."""
        self._address = (host, port)
        self._rank, self._size = rank, size
        # Not later, in the thread: on a busy machine the store took more than two
        # seconds to answer, and torch prints a traceback for every attempt.
        self._store = self._connect(patience)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def beating(self, seconds: float) -> Iterator[None]:
        """Leave a sign of life every `seconds` within the block, in a thread."""
        self._over.clear()
        # A daemon, because a call to the store may block it forever.
        self._thread = threading.Thread(
            target=self._beat, args=(seconds,), name="pulse", daemon=True
        )
        self._thread.start()
        try:
            yield
        finally:
            self.end()

    def end(self) -> None:
        """Leave no more signs. Call it on all ranks before the store is closed: a sign
        for a closed store makes torch print errors.
        """
        self._over.set()
        if self._thread is not None:
            # A thread that returns from the store after Python has ended would abort
            # the process (seen with 16 ranks on 2 cores). Do not wait forever, as the
            # store may not answer.
            self._thread.join(2 * ANSWER)
            self._thread = None

    def silent(self, seconds: float) -> list[int]:
        """Watch for `seconds` seconds, and return the ranks that leave no sign of life.

        Return rank 0 if the store does not answer, and no rank if the store is gone:
        then rank 0 has ended. While this rank is suspended it does not watch, since
        others may be suspended, too.
        """
        found: list[list[int]] = []
        looking = threading.Thread(
            target=lambda: found.append(self._look(seconds)), name="silent", daemon=True
        )
        looking.start()
        awake = Awake(PAUSE)
        # Allow the time of one answer for each of the two looks at the store.
        while looking.is_alive() and awake.look() < seconds + 2 * ANSWER:
            looking.join(PAUSE)
        return found[0] if found else [0]

    def _beat(self, seconds: float) -> None:
        beats = 0
        while not self._over.is_set():
            beats += 1
            try:
                self._store.set(f"pulse/{self._rank}", str(beats))
            except RuntimeError:
                return  # the store is gone, together with its rank
            self._over.wait(seconds)

    def _look(self, seconds: float) -> list[int]:
        """Return the ranks whose sign has not changed after `seconds` seconds."""
        try:
            # torch tries a closed port again and again, and prints each attempt.
            socket.create_connection(self._address, ANSWER).close()
            store = self._connect(timedelta(seconds=ANSWER))
            before = self._signs(store)
            awake = Awake(PAUSE)
            while awake.look() < seconds:
                time.sleep(PAUSE)
            after = self._signs(store)
        except (OSError, RuntimeError):
            return []
        return [rank for rank in range(self._size) if before[rank] == after[rank]]

    def _signs(self, store: dist.TCPStore) -> list[bytes]:
        """Return the last sign of every rank; empty for a rank that has left none."""
        names = [f"pulse/{rank}" for rank in range(self._size)]
        # Two messages, not two for each rank: hundreds may look at the same time. If
        # one name is missing, the store would wait for it.
        if store.check(names):
            signs: list[bytes] = store.multi_get(names)
            return signs
        return [store.get(name) if store.check([name]) else b"" for name in names]

    def _connect(self, timeout: timedelta) -> dist.TCPStore:
        """Open a separate connection: a blocking call would block all others."""
        return dist.TCPStore(
            *self._address, is_master=False, wait_for_workers=False, timeout=timeout
        )
