"""How the program `hpcfed` ends once its work is done."""

import ctypes
import os

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
