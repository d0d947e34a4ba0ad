"""Quick imports, for the program `hpcfed`: torch's alone are most of its start."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from hpcfed.runtime import cache


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
    took half a second. So this is for the program `hpcfed` alone.
    """
    gc.disable()
    try:
        yield
    finally:
        # A user's network may have loaded triton, which complains at exit about every
        # object of its own that was not collected.
        if "triton" not in sys.modules:
            gc.freeze()
        gc.enable()
