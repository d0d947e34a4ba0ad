"""Which kind of fault is next, and how long a campaign still takes."""

import random
import sys
import time
from collections import deque

from benchmarks.faults.asides import ASIDE
from benchmarks.faults.lives import Tally


class Schedule:
    """Kinds of faults in turn, in a new random order each time; and what was found."""

    def __init__(
        self, kinds: list[str], *, trials: int, minutes: float, chance: random.Random
    ) -> None:
        self.tallies = {kind: Tally() for kind in kinds}
        self._trials, self._chance = trials, chance
        self._begin = time.monotonic()
        self._end = self._begin + 60 * minutes
        self._pending: deque[str] = deque()

    @property
    def done(self) -> int:
        """How many trials there were."""
        return sum(tally.trials for tally in self.tallies.values())

    @property
    def enough(self) -> bool:
        """Whether all trials are done, or the time is over."""
        return self.done >= self._trials or time.monotonic() > self._end

    def asides(self, most: int) -> list[str]:
        """Return the next kinds that have runs of their own; none where a run that is
        at work comes first.
        """
        if not self._pending:
            self._refill()
        kinds = [kind for kind in self._pending if kind in ASIDE]
        return kinds[: min(most, self._trials - self.done)]

    def next(self) -> str:
        """Return the next kind of fault for the run that is at work."""
        while True:
            for kind in self._pending:
                if kind not in ASIDE:
                    return kind
            self._refill()

    def tick_off(self, kind: str, reported: int) -> None:
        """Count a turn of this kind of fault, and print it with the rounds done so far."""
        self._pending.remove(kind)
        each = (time.monotonic() - self._begin) / self.done
        left = min(each * (self._trials - self.done), self._end - time.monotonic())
        line = f"trial {self.done} of {self._trials}: {kind} in round {reported}"
        line += f"; {each:.1f} s each, {max(0.0, left) / 60:.1f} min left"
        print(line, file=sys.stderr, flush=True)

    def _refill(self) -> None:
        kinds = list(self.tallies)
        self._chance.shuffle(kinds)
        # Behind those that are left, so that every kind comes equally often.
        self._pending.extend(kinds)
