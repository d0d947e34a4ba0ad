"""When a run stops, and when it writes a checkpoint.

After a signal it finishes the round, writes a checkpoint, and exits with code 75.
"""

import os
import signal
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STOPPED = 75
"""Exit code of a stopped run that can be resumed: sysexits.h's temporary failure."""
PAUSE = 100
"""The pause between checkpoints is at least this many times their writing time."""
HEARD = "hpcfed: stops when this round is over; a second Ctrl-C ends it at once\n"
# SIGTERM comes from preemption and scancel, SIGINT from Ctrl-C, and SIGUSR2 from
# slurm/run.sbatch, two minutes before the job's time limit.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


class WritingPace:
    """Tells when to write anew what a killed run goes on from, every so many seconds.

    Writing takes at most one hundredth of the time.
    """

    def __init__(self, every: float) -> None:
        """`every`: seconds after which it is too old; 0: never."""
        self._every = every
        self._written = time.monotonic()
        self._took = 0.0

    @property
    def is_due(self) -> bool:
        """Whether it is too old, and worth the time that writing takes."""
        return 0 < self._every < self._age and self.is_worth_it

    @property
    def is_worth_it(self) -> bool:
        """Whether writing would take a hundredth of the time since the last, or less."""
        return self._age > PAUSE * self._took

    @property
    def _age(self) -> float:
        return time.monotonic() - self._written

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Note when, and for how long, the block writes."""
        begin = time.monotonic()
        yield
        self._written = time.monotonic()
        self._took = self._written - begin


class Stop:
    """Knows whether to stop, and whether the last checkpoint is too old."""

    def __init__(
        self, every: float = 0.0, *, ends_process: bool = True, go_on: str = ""
    ) -> None:
        """`every`: seconds after which a checkpoint is too old; 0: never.
        `ends_process`: whether the process ends with the run. `go_on`: what to do after
        a stop, if not to resume the run.
        """
        self.go_on = go_on
        self._ends_process = ends_process
        self.asked = False
        self.agreed = False
        """Whether all ranks have stopped because of it."""
        self._told: Collection[int] = ()
        # Stacked seeds ask one after the other about the same round. A signal or a
        # second in between must not separate them, so the first answer is kept.
        self._stops: dict[int, bool] = {}
        self._due: dict[int, bool] = {}
        self.checkpoints = WritingPace(every)

    def tell(self, *, alone: bool) -> None:
        """Say on stderr, from now on, that a signal was heard: a round can take long."""
        # A rank beside one that has failed gets SIGTERM, too. What it says would bury
        # the other's message, so ranks say nothing of it.
        self._told = [one for one in SIGNALS if alone or one != signal.SIGTERM]

    @contextmanager
    def listening(self) -> Iterator["Stop"]:
        """Remember the first signal within the block; a second Ctrl-C ends the process
        as usual.

        If the process ends with the run, SIGUSR2 is ignored afterwards: it has no other
        meaning, and must not end a run that is just complete.
        """
        # Python lets only the main thread set handlers.
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._heard) for number in SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                late = number == signal.SIGUSR2 and handler is signal.SIG_DFL
                late = late and self._ends_process
                signal.signal(number, signal.SIG_IGN if late else handler)

    def after(self, round: int) -> bool:
        """Return whether to stop after this round; all seeds get the same answer."""
        # The first seed to ask decides for all.
        return self._stops.setdefault(round, self.asked)

    def is_due(self, round: int) -> bool:
        """Return whether the last checkpoint is too old after this round; all seeds get
        the same answer.
        """
        return self._due.setdefault(round, self.checkpoints.is_due)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        # Only set the flag here: the loop checks it when the round is over.
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        if number in self._told and not self.asked:
            # Not print: the signal may have come in the middle of one.
            with suppress(OSError):
                os.write(2, HEARD.encode())
        self.asked = True
