"""When a run stops, and when it writes a checkpoint.

Asked by a signal, it ends the round, writes a checkpoint, and leaves with exit code 75.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPED = 75
"""Exit code of a run that was asked to stop and can go on: what sysexits.h calls a
temporary failure.
"""
PAUSE = 100
"""How many times longer than writing a checkpoint the pause before the next is, at
least.
"""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


class Stop:
    """Whether this process was asked to stop, and whether its last checkpoint is too
    old.
    """

    def __init__(self, every: float = 0.0) -> None:
        """`every`: seconds after which a checkpoint is too old; 0: it never is."""
        self.asked = False
        self.agreed = False
        """Whether all ranks have stopped for it."""
        self._answers: dict[int, bool] = {}
        self._every = every
        self._written = time.monotonic()
        self._took = 0.0
        self._due: dict[int, bool] = {}

    @contextmanager
    def listening(self) -> Iterator["Stop"]:
        """Within, the first signal is remembered; a second Ctrl-C ends the process as
        it always did.

        Afterwards SIGUSR2, which means nothing but this, is ignored: it must not end a
        run that is just complete.
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
        """Whether to stop after a round: the answer to the first who asks is
        everybody's.

        Several seeds ask one after the other, and a signal that comes in between must
        not part them.
        """
        return self._answers.setdefault(round, self.asked)

    def is_due(self, round: int) -> bool:
        """Whether the last checkpoint is too old after a round; again one answer for
        all seeds.

        Those that are written for this reason take one hundredth of the time at most.
        """
        age = time.monotonic() - self._written
        return self._due.setdefault(
            round, self._every > 0 and age > max(self._every, PAUSE * self._took)
        )

    @contextmanager
    def checkpointing(self) -> Iterator[None]:
        """Within, a checkpoint is written."""
        begin = time.monotonic()
        yield
        self._written = time.monotonic()
        self._took = self._written - begin

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True
