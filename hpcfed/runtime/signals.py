"""Signals that ask a run to stop: it ends the round, writes a checkpoint, and leaves with exit code 75."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPED = 75
"""Exit code of a run that was asked to stop and can go on: what sysexits.h calls a temporary failure."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


class Stop:
    """Whether this process was asked to stop."""

    def __init__(self) -> None:
        self.asked = False
        self.agreed = False
        """Whether all ranks have stopped for it."""
        self._answers: dict[int, bool] = {}

    @contextmanager
    def listening(self) -> Iterator["Stop"]:
        """Within, the first signal is remembered; a second Ctrl-C ends the process as it always did.

        Afterwards SIGUSR2, which means nothing but this, is ignored: it must not end a run that is just complete.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._heard) for number in SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                late = number == signal.SIGUSR2 and handler is signal.SIG_DFL
                signal.signal(number, signal.SIG_IGN if late else handler)

    def after(self, round: int) -> bool:
        """Whether to stop after a round: the answer to the first who asks is everybody's.

        Several seeds ask one after the other, and a signal that comes in between must not part them.
        """
        return self._answers.setdefault(round, self.asked)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True
