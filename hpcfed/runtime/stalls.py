"""Ends a run whose ranks wait for each other for ever: a rank that hangs tells nobody,
so those that wait must.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hpcfed.runtime.awake import Awake, Clock

PATIENCE = {"server": 10}
"""Times as long as usual: there workers wait while the server's model learns."""


Progress = Callable[[], tuple[int, str]]
"""How often the phase has changed, and which it is."""
GiveUp = Callable[[str, float], None]
"""Told of a phase, and for how many seconds it has lasted."""


@contextmanager
def ending_stalls(
    progress: Progress, seconds: float, give_up: GiveUp
) -> Iterator[None]:
    """Within, a thread looks on.

    When a phase lasts for so many seconds, `give_up` is told of it, and the process
    ends with 1, whatever it waits for: the launcher then ends the other ranks. Time for
    which this process was suspended does not count. 0 seconds: nobody looks.
    """
    if not seconds:
        yield
        return
    over = threading.Event()
    thread = threading.Thread(
        target=_watch,
        args=(progress, seconds, give_up, over),
        name="stalls",
        daemon=True,
    )
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _watch(
    progress: Progress,
    seconds: float,
    give_up: GiveUp,
    over: threading.Event,
    clock: Clock = time.monotonic,
) -> None:
    awake = Awake(min(1.0, seconds / 8), clock)
    seen, since = progress(), awake.look()
    while not over.wait(awake.pause):
        now, passed = progress(), awake.look()
        if now != seen:
            seen, since = now, passed
            continue
        waited = passed - since
        if waited > seconds * PATIENCE.get(now[1], 1):
            give_up(now[1], waited)
            os._exit(1)
