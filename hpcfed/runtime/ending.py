"""How the program `hpcfed` ends: once its work is done, or if it cannot go on."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

_TOOLS = ("LD_PRELOAD", "CUDA_INJECTION64_PATH")
"""Variables that load profilers, which write their files when the process ends."""


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
    script = 'sleep "$0"; echo "$1" >&2; kill "$2"'
    words = ["sh", "-c", script, f"{seconds:g}", line, str(os.getpid())]
    # In a session of its own, so that its sleep ends with it.
    watcher = subprocess.Popen(words, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(watcher.pid, signal.SIGKILL)
        watcher.wait()
