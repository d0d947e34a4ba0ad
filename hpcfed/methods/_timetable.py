"""When clients that train at their own pace start and arrive, and from which version of
the server's row each of them starts.

Virtual seconds follow from devices, steps and bytes, never from what is learnt. So all
arrivals of a round are known before anybody trains, the same on every rank, and clients
whose starts exist can train together.

- `places` clients train at any time. When one arrives, or would have arrived, another
  is invited: uniformly from the clients that have data, are there, and do not train.
- The server makes a version of its row of every `buffer` uploads.
- Two that arrive at the same moment arrive in the order of their ids.

Clients go by their positions among those that have data.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import isfinite
from typing import NamedTuple

import numpy as np

from hpcfed.errors import UserError
from hpcfed.federation.channel.trace import Availability

TRIES = 16
"""Draws among all that do not train, before those are listed who are there."""

Draw = Callable[[], float]
"""Returns a random number in [0, 1)."""


class InTraining(NamedTuple):
    """A client that trains; in the order of arrival."""

    seconds: float
    """Virtual time at which its upload arrives, or would have arrived."""
    position: int
    """Which client it is, among those that have data."""
    version: int
    """The version of the server's row that it has started from."""
    lost: bool
    """Whether its upload never comes."""


@dataclass(frozen=True)
class Pace:
    """What decides on starts and arrivals."""

    seconds: np.ndarray
    """What each client takes from its invitation to the arrival of its upload."""
    places: int
    """Clients that train at the same time, where there are so many."""
    buffer: int = 1
    """Uploads of which the server makes a version."""
    dropout_rate: float = 0.0
    """Probability that an upload never comes."""
    presence: Availability | None = None
    """When each client is there; None: always."""


class Timetable:
    """The clients that train, at one moment of virtual time after the other."""

    def __init__(
        self,
        pace: Pace,
        training: Iterable[InTraining] = (),
        *,
        now: float = 0.0,
        received: int = 0,
    ) -> None:
        """Go on at virtual time `now`, after so many uploads have been `received`."""
        self.now = now
        self.received = received
        self._pace = pace
        self._training = list(training)
        heapify(self._training)
        busy = [one.position for one in self._training]
        self._idle = Idle(len(pace.seconds), busy)

    @property
    def training(self) -> list[InTraining]:
        """Those that train now, in the order in which they will arrive."""
        return sorted(self._training)

    def receive(self, uploads: int, draw: Draw) -> list[InTraining]:
        """Go on until so many uploads have arrived, and return them in that order; with
        them those that were lost meanwhile.
        """
        arrivals: list[InTraining] = []
        wanted = self.received + uploads
        self._invite(draw)
        while self.received < wanted:
            one = heappop(self._training)
            self.now = one.seconds
            self.received += not one.lost
            self._idle.add(one.position)
            arrivals.append(one)
            self._invite(draw)
        return arrivals

    def _invite(self, draw: Draw) -> None:
        """Fill all places; one for which nobody is there stays free until the next
        arrival.
        """
        pace, training = self._pace, self._training
        if not training and pace.presence is not None:
            # Nobody will arrive: time goes on until somebody is there.
            self.now = pace.presence.next(self.now)
            if not isfinite(self.now):
                raise UserError("no client is ever available again; see the trace")
        idle, rate = self._idle, pace.dropout_rate
        version = self.received // pace.buffer
        while len(training) < pace.places and idle.count:
            if pace.presence is None:
                position = idle.take(int(draw() * idle.count))
            elif (found := self._one_there(pace.presence, draw)) is not None:
                position = found
            else:
                return
            arrival = self.now + pace.seconds.item(position)
            lost = rate > 0 and draw() < rate
            heappush(training, InTraining(arrival, position, version, lost))

    def _one_there(self, presence: Availability, draw: Draw) -> int | None:
        """Draw one of those that are there and do not train; None where nobody is."""
        idle = self._idle
        there = presence.at(self.now)
        for _ in range(TRIES):
            number = int(draw() * idle.count)
            if there[idle.at(number)]:
                return idle.take(number)
        numbers = np.flatnonzero(there[idle.listed()])
        if not len(numbers):
            return None
        return idle.take(numbers.item(int(draw() * len(numbers))))


class Idle:
    """A list of those of so many clients that are not busy, in no particular order.

    The list is never written out, so that ten thousand clients cost no more than a
    hundred: at number n is client n, unless `_moved` has another one there.
    """

    def __init__(self, total: int, busy: Iterable[int]) -> None:
        taken = set(busy)
        self.count = total - len(taken)
        # Those that are busy leave gaps, which the last ones of all fill.
        gaps = sorted(position for position in taken if position < self.count)
        last = [p for p in range(self.count, total) if p not in taken]
        self._moved = dict(zip(gaps, last, strict=True))

    def at(self, number: int) -> int:
        """Return who is at this number of the list."""
        return self._moved.get(number, number)

    def listed(self) -> np.ndarray:
        """Write the list out."""
        found = np.arange(self.count)
        for number, position in self._moved.items():
            if number < self.count:
                found[number] = position
        return found

    def add(self, position: int) -> None:
        """Append somebody."""
        self._moved[self.count] = position
        self.count += 1

    def take(self, number: int) -> int:
        """Remove who is at this number; the last of the list takes its place."""
        moved = self._moved
        self.count = last = self.count - 1
        taken = moved.get(number, number)
        moved[number] = moved.get(last, last)
        return taken


def waves(
    positions: list[int], versions: list[int], *, received: int, buffer: int
) -> list[range]:
    """Cut uploads, the first of them after so many were `received`, into the longest
    runs that can train together: all start from versions that exist before the run, and
    nobody arrives twice in one.
    """
    runs = []
    begin, existing = 0, received // buffer
    clients: set[int] = set()
    for number, position in enumerate(positions):
        if versions[number] > existing or position in clients:
            runs.append(range(begin, number))
            begin, existing = number, (received + number) // buffer
            clients.clear()
        clients.add(position)
    return [*runs, range(begin, len(positions))]
