"""How the program `hpcfed` ends: once its work is done, or if it cannot go on."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_TOOLS = ("LD_PRELOAD", "CUDA_INJECTION64_PATH")
"""Variables that load profilers, which write their files when the process ends."""
_WATCHER = """
import os, select, signal, sys
seconds, line, watched = float(sys.argv[1]), sys.argv[2], int(sys.argv[3])
# Its standard input ends with the process that it watches, however that ends.
ended, _, _ = select.select([0], [], [], seconds)
# Another process may have the number by now.
if not ended and os.getppid() == watched:
    print(line + "\\n", end="", file=sys.stderr, flush=True)
    os.kill(watched, signal.SIGTERM)
"""
"""A program that ends its parent after some seconds."""


def skip_destructors() -> None:
    """Have the process end as soon as Python has, with the same exit status.

    Python ends as always. Then the destructors of torch's libraries would take another
    0.2 s (two ARM cores) to tidy up memory that the system takes back anyway.
    """
    libc = ctypes.CDLL(None)
    # Only in glibc; its handlers get the exit status, and the latest runs first.
    if any(name in os.environ for name in _TOOLS) or not hasattr(libc, "on_exit"):
        return
    libc.on_exit(libc._exit, None)
    # `_exit` does not write what libraries have printed.
    libc.on_exit(libc.fcloseall, None)


@contextmanager
def ended_from_outside(line: str, seconds: float) -> Iterator[None]:
    """Print the line and end this process if the block takes longer, by a process of its
    own: while MPI starts it holds Python's lock, so no thread of ours would run.
    """
    words = [sys.executable, "-ISc", _WATCHER, str(seconds), line, str(os.getpid())]
    # In a session of its own: Ctrl-C is not for it.
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, start_new_session=True
    ) as watcher:
        try:
            yield
        finally:
            watcher.kill()
