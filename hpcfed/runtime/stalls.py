"""End a run whose ranks wait for each other for ever: a rank that hangs tells nobody, so
those that wait must.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hpcfed.runtime.awake import Awake, Clock

PATIENCE = {"server": 10}
"""Times as long as usual that a phase may last: in `server` workers wait while the
server trains its model.
"""
Progress = Callable[[], tuple[int, str]]
"""Returns how often the phase has changed, and which it is."""
GiveUp = Callable[[str, float], None]
"""Gets a phase, and for how many seconds it has lasted."""


@contextmanager
def ending_stalls(
    progress: Progress, seconds: float, give_up: GiveUp
) -> Iterator[None]:
    """Watch the phases within the block, in a thread.

    When a phase lasts longer than so many seconds, call `give_up` and end the process
    with code 1, whatever it waits for; the launcher then ends the other ranks. Time for
    which this process was suspended does not count. 0 seconds: no watch is kept.
    """
    if not seconds:
        yield
        return
    over = threading.Event()
    watcher = threading.Thread(
        target=_watch,
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
        _, phase = now
        waited = passed - since
        if waited > seconds * PATIENCE.get(phase, 1):
            give_up(phase, waited)
            # sys.exit would end this thread alone, and the main thread is stuck in a
            # collective that nothing can interrupt.
            os._exit(1)
