"""The program `hpcfed`.

It takes Ctrl-C from its first moment on, and long commands outlive their terminal.
"""

import signal
import sys

from hpcfed.runtime.interrupts import leave

LASTING = ("run", "profile", "study")
"""Commands that go on when the terminal has gone, as after a dropped connection."""


def main() -> None:
    python_handler = signal.getsignal(signal.SIGINT)
    # A script's background job is started with Ctrl-C ignored, and goes on ignoring it.
    if python_handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)
    if sys.argv[1:2] and sys.argv[1] in LASTING:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Importing takes a while: only here, with the handlers in place.
    from hpcfed.runtime.imports import keep_bytecode, without_collecting

    keep_bytecode()
    with without_collecting():
        from hpcfed.cli import main as command

    if python_handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, python_handler)
    command()


if __name__ == "__main__":
    main()
