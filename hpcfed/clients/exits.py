"""sys.exit in user code, which must end a run as any other failure does."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from hpcfed.plugins import line_of_user


class ExitCalled(Exception):
    """User code has called sys.exit in the middle of a run."""


@contextmanager
def without_exits() -> Iterator[None]:
    """Turn sys.exit into a failure: other ranks would wait, and the code might be 0."""
    try:
        yield
    except SystemExit as exit:
        called = ExitCalled(f"sys.exit({exit.code!r}) was called{_exit_line(exit)}")
        # The traceback is kept because the user's own line is looked up in it.
        raise called.with_traceback(exit.__traceback__) from None


def _exit_line(exit: SystemExit) -> str:
    """Return where exit was called, unless that is in a user's file."""
    frames = traceback.extract_tb(exit.__traceback__)
    if line_of_user(exit) or not frames:
        return ""
    return f" ({frames[-1].filename}, line {frames[-1].lineno})"
