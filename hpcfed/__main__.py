"""The program `hpcfed`: Ctrl-C works at once, and long commands keep running."""

import signal
import sys

from hpcfed.runtime.interrupts import leave

LASTING = ("run", "profile", "study")
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
    from hpcfed.runtime.imports import keep_bytecode, without_collecting

    keep_bytecode()
    with without_collecting():
        from hpcfed.cli import main as command

    if python_handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, python_handler)
    command()


if __name__ == "__main__":
    main()
