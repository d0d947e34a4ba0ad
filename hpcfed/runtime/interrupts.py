"""What Ctrl-C does before a command has begun: loaded first, so it loads little."""

import os
from types import FrameType


def leave(number: int, frame: FrameType | None) -> None:
    """End the process at once, as a handler of a signal."""
    os.write(2, b"hpcfed: interrupted\n")
    os._exit(130)
