"""Fast imports for the program `hpcfed`: torch's imports are most of its start-up."""

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

REPRESENTATIVES = ("torch", "hpcfed.experiment.run")
"""A module for all of torch's, and one for all of ours: not our first ones, which other
programs load as well.
"""


def keep_bytecode() -> None:
    """Have Python keep compiled modules in the user's cache, if it keeps them nowhere.

    In a read-only image, in a shared installation, or with PYTHONDONTWRITEBYTECODE,
    they would be compiled at every start. Measured to the first round: torch's take 1.8
    of 4.2 s on a GPU machine, our own 0.5 of 3.4 s on two ARM cores.
    """
    if sys.pycache_prefix is not None or all(map(_is_kept, REPRESENTATIVES)):
        return
    folder = cache.bytecode_folder()
    if folder is not None:
        sys.pycache_prefix = str(folder)
        sys.dont_write_bytecode = False


ALLOCATION = {"MIMALLOC_PURGE_DELAY": "10000", "THP_MEM_ALLOC_ENABLE": "1"}
"""Settings of torch's allocators: milliseconds until freed memory is returned (ARM),
and huge pages for large tensors (x86).
"""


def keep_memory() -> None:
    """Have torch's tensors on CPUs find their memory mapped: what a step frees, the next
    one wants again.

    On ARM freed memory is returned to the system at once, and comes back page by page:
    9,500 faults in each round of cnn-cifar and 27,000 of cnn-pfl, 3 and 5 % of their
    time. On x86 tensors beyond 32 MiB come back so (31,800 faults in a round of cnn-pfl),
    and small pages are looked up slowly: huge ones bring a round from 488 to 352 ms, and
    cnn-cifar's from 128 to 87.
    """
    # Read when torch is loaded.
    for name, value in ALLOCATION.items():
        os.environ.setdefault(name, value)


def _is_kept(module: str) -> bool:
    """Tell whether Python keeps a module compiled, now or from this start on."""
    # This finds it without importing it.
    found = find_spec(module)
    if found is None or found.cached is None:
        return True
    kept = Path(found.cached)
    will_be = os.access(kept.parents[1], os.W_OK) and not sys.dont_write_bytecode
    return kept.exists() or will_be


@contextmanager
def without_collecting() -> Iterator[None]:
    """Import within the block without garbage collection.

    Imports create hundreds of thousands of objects and almost no garbage, yet Python
    scans all of them again and again: a tenth of torch's import time. Objects that
    exist at the end of the block are never scanned again, not even at exit, where it
    took half a second. So only the program `hpcfed` may use this. Within the block,
    Ctrl-C ends the process immediately.
    """
    gc.disable()
    try:
        with _ended_by_interrupts():
            yield
    finally:
        # A user's network may have loaded triton, which complains at exit about each of
        # its objects that was not collected.
        if "triton" not in sys.modules:
            gc.freeze()
        gc.enable()


@contextmanager
def _ended_by_interrupts() -> Iterator[None]:
    """End the process at Ctrl-C within the block, since it has not done anything yet.

    Not by an exception: modules that are being imported could catch it.
    """
    plain = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    # Only the main thread may set handlers, and a run's own handler is kept.
    if not plain or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
