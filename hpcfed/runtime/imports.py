"""Quick imports, for the program `hpcfed`: torch's alone are most of its start."""

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from hpcfed.runtime import cache
from hpcfed.runtime.interrupts import leave


def keep_bytecode() -> None:
    """Have Python keep compiled modules in the user's cache, where it keeps them nowhere.

    In an image that is read-only, in a shared installation, or with
    PYTHONDONTWRITEBYTECODE, all of torch would be compiled at every start: 1.8 s of the
    4.2 s to the first round (measured on a GPU machine).
    """
    # torch stands for all of them; this finds it without importing it.
    torch = find_spec("torch")
    if torch is None or torch.cached is None or sys.pycache_prefix is not None:
        return
    kept = Path(torch.cached)
    will_be = os.access(kept.parents[1], os.W_OK) and not sys.dont_write_bytecode
    if kept.exists() or will_be:
        return
    folder = cache.own_folder("bytecode")
    if folder is not None:
        sys.pycache_prefix = str(folder)
        sys.dont_write_bytecode = False


@contextmanager
def without_collecting() -> Iterator[None]:
    """Import within the block without looking for garbage.

    Imports make hundreds of thousands of objects and nearly no garbage, yet Python goes
    through all of them again and again: a tenth of the time that torch takes. What is
    there at the end of the block is never looked at again, not even at exit, where it
    took half a second. So this is for the program `hpcfed` alone. Ctrl-C ends it at
    once meanwhile.
    """
    gc.disable()
    try:
        with _ended_by_interrupts():
            yield
    finally:
        # A user's network may have loaded triton, which complains at exit about every
        # object of its own that was not collected.
        if "triton" not in sys.modules:
            gc.freeze()
        gc.enable()


@contextmanager
def _ended_by_interrupts() -> Iterator[None]:
    """End the process at Ctrl-C within the block, while it has done nothing yet.

    Not by an exception: the modules that are being imported could catch it.
    """
    plain = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    # Only the main thread may set handlers, and a run's own handler stays.
    if not plain or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
