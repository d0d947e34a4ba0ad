"""Seconds that do not count while this process is suspended, as by SIGSTOP or `scontrol
suspend`.
"""

import time
from collections.abc import Callable

Clock = Callable[[], float]


class Awake:
    """Counts seconds, but not those for which this process was suspended.

    Nothing tells a process that it was suspended. So the caller must look every `pause`
    seconds: when far more have passed, the process was not there to look. A busy
    machine makes looks late, so a gap counts up to twice the pause.
    """

    def __init__(self, pause: float, clock: Clock = time.monotonic) -> None:
        self.pause = pause
        self._clock = clock
        self._last = clock()
        self._seconds = 0.0

    def look(self) -> float:
        """Return the seconds so far."""
        # time.monotonic goes on while a process is stopped: that shows as a long gap.
        now = self._clock()
        self._seconds += min(now - self._last, 2 * self.pause)
        self._last = now
        return self._seconds
