"""The program `hpcfed`: Ctrl-C works at once, and long commands keep running."""

import signal
import sys

from hpcfed.runtime.interrupts import leave

LASTING = ("run", "profile", "study", "benchmark")
"""Commands that keep running when the terminal closes, as after a dropped connection.
"""


def main() -> None:
    python_handler = signal.getsignal(signal.SIGINT)
    # A script's background job starts with Ctrl-C ignored, and must keep ignoring it.
    if python_handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)
    if sys.argv[1:2] and sys.argv[1] in LASTING:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Importing takes a while, so wait until the handlers are in place.
    from hpcfed.runtime.imports import keep_bytecode, keep_memory, without_collecting
    from hpcfed.runtime.starting import starting

    starting.begin_program()
    keep_bytecode()
    keep_memory()
    with without_collecting():
        from hpcfed.cli import main as command

    if python_handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, python_handler)
    command()
    _end()


def _end() -> None:
    """End quickly, unless others may wait for the end of the process."""
    from hpcfed import plugins
    from hpcfed.runtime.ending import skip_destructors
    from hpcfed.runtime.launcher import launched

    # Users may have left files of other libraries open, and MPI has its own end.
    if "torch" in sys.modules and launched().alone and not plugins.are_used():
        skip_destructors()


if __name__ == "__main__":
    main()
