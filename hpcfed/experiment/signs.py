"""Signs of life that a run leaves in its folder, so that others can watch it from any
machine that sees the folder.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hpcfed.experiment.failures import Reporting
from hpcfed.results.folder import SIGN
from hpcfed.results.signs import EVERY, RunSign, leave_sign, remove_sign
from hpcfed.runtime.timer import Timer


@contextmanager
def showing_life(
    folders: Sequence[Path],
    reporting: Reporting,
    timers: Sequence[Timer],
    *,
    visible: bool,
) -> Iterator[None]:
    """Leave a sign in each folder every few seconds within the block, on the rank that
    is `visible`.

    A thread writes them: a round may take minutes, and a file system may hang.
    """
    if not visible:
        yield
        return

    def changes() -> int:
        return sum(timer.changes for timer in timers)

    paths = [folder / SIGN for folder in folders]
    over = threading.Event()
    # A daemon, because the run must not wait for a file system that hangs.
    beating = threading.Thread(
        target=_beat,
        args=(paths, reporting.phase, changes, over),
        name="signs",
        daemon=True,
    )
    beating.start()
    try:
        yield
    finally:
        over.set()
        # It may be just about to write another one.
        beating.join(EVERY)
        for path in paths:
            remove_sign(path)


def _beat(
    paths: Sequence[Path],
    phase: Callable[[], str],
    changes: Callable[[], int],
    over: threading.Event,
) -> None:
    seen, since = changes(), time.monotonic()
    while not over.is_set():
        now, clock = changes(), time.monotonic()
        if now != seen:
            seen, since = now, clock
        for path in paths:
            leave_sign(path, RunSign(phase(), clock - since))
        over.wait(EVERY)
