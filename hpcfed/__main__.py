"""The program `hpcfed`. From its first moment on it takes Ctrl-C, and what lasts
outlives its terminal.
"""

import os
import signal
import sys
from types import FrameType

LASTING = ("run", "profile", "study")
"""Commands that go on when the terminal has gone, as after a dropped connection."""


def _leave(number: int, frame: FrameType | None) -> None:
    """Ends a program that has done nothing yet. An exception could be caught by what is
    being imported.
    """
    os.write(2, b"hpcfed: interrupted\n")
    os._exit(130)


def main() -> None:
    taken = signal.signal(signal.SIGINT, _leave)
    if sys.argv[1:2] and sys.argv[1] in LASTING:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    from hpcfed.cli.commands import main as command

    signal.signal(signal.SIGINT, taken)
    command()


if __name__ == "__main__":
    main()
