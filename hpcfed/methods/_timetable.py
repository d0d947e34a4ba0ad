"""The timetable of clients that train at their own pace: when each starts and arrives,
and from which version of the server's row it starts.

Virtual seconds depend on devices, steps and bytes, never on training. So every rank
knows all arrivals of a round before any client trains, and clients whose starting rows
exist can train together.

- `places` clients train at any time. When one arrives, or would have arrived if it was
  not lost, another is invited: uniformly from idle, available clients with data.
- The server makes a new version of its row after every `buffer` uploads.
- Clients that arrive at the same moment are ordered by id.

A client's position is its index among the clients with data.
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
"""How often to sample from all idle clients until one is available. After that, list
the available ones and sample from these.
"""

Draw = Callable[[], float]
"""Returns a random number in [0, 1)."""


class InTraining(NamedTuple):
    """A client in training. The order of the fields sorts clients by arrival."""

    seconds: float
    """Virtual time at which its upload arrives, or would have arrived."""
    position: int
    """Its index among the clients with data."""
    version: int
    """The version of the server's row from which it has started."""
    lost: bool
    """Whether its upload never arrives."""


@dataclass(frozen=True)
class Pace:
    """What determines starts and arrivals."""

    seconds: np.ndarray
    """Time of each client from its invitation to the arrival of its upload."""
    places: int
    """The most clients that train at the same time."""
    buffer: int = 1
    """Number of uploads per version of the server's row."""
    dropout_rate: float = 0.0
    """Probability that an upload never arrives."""
    presence: Availability | None = None
    """When each client is available; None: always."""


class Timetable:
    """The clients in training as virtual time advances."""

    def __init__(
        self,
        pace: Pace,
        training: Iterable[InTraining] = (),
        *,
        now: float = 0.0,
        received: int = 0,
    ) -> None:
        """Continue at virtual time `now`, after `received` uploads."""
        self.now = now
        self.received = received
        self._pace = pace
        self._training = list(training)
        heapify(self._training)
        # A client trains once at a time, so a client in training is not idle.
        busy = [one.position for one in self._training]
        self._idle = Idle(len(pace.seconds), busy)

    @property
    def training(self) -> list[InTraining]:
        """The clients in training now, in the order of arrival."""
        return sorted(self._training)

    def receive(self, uploads: int, draw: Draw) -> list[InTraining]:
        """Advance until `uploads` uploads have arrived, and return them in that order,
        including those that were lost meanwhile.
        """
        arrivals: list[InTraining] = []
        wanted = self.received + uploads
        self._invite(draw)
        while self.received < wanted:
            one = heappop(self._training)
            self.now = one.seconds
            # A lost client frees its place, but is not one of the uploads.
            self.received += not one.lost
            self._idle.add(one.position)
            arrivals.append(one)
            self._invite(draw)
        return arrivals

    def _invite(self, draw: Draw) -> None:
        """Fill all places; without an available client, one waits for an arrival."""
        pace, training = self._pace, self._training
        if not training and pace.presence is not None:
            # No arrival is pending: skip to the time when a client is available.
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
        """Sample an idle client that is available; return None if there is none."""
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
    """A list of the idle clients among `total`, in no particular order.

    The list is implicit, so that ten thousand clients cost no more than a hundred:
    entry n is client n, unless `_moved` says otherwise.
    """

    def __init__(self, total: int, busy: Iterable[int]) -> None:
        taken = set(busy)
        self.count = total - len(taken)
        # Busy clients leave gaps below `count`; idle ones from above fill them.
        gaps = sorted(position for position in taken if position < self.count)
        last = [p for p in range(self.count, total) if p not in taken]
        self._moved = dict(zip(gaps, last, strict=True))

    def at(self, number: int) -> int:
        """Return the client at this index of the list."""
        return self._moved.get(number, number)

    def listed(self) -> np.ndarray:
        """Return the list as an array."""
        found = np.arange(self.count)
        for number, position in self._moved.items():
            if number < self.count:
                found[number] = position
        return found

    def add(self, position: int) -> None:
        """Append a client."""
        self._moved[self.count] = position
        self.count += 1

    def take(self, number: int) -> int:
        """Remove and return the client at this index; the last one takes its place."""
        moved = self._moved
        self.count = last = self.count - 1
        taken = moved.get(number, number)
        # An entry at or beyond `count` is stale, and is overwritten before it is read
        # again.
        moved[number] = moved.get(last, last)
        return taken


def waves(
    positions: list[int], versions: list[int], *, received: int, buffer: int
) -> list[range]:
    """Cut the uploads that follow the first `received` ones into the longest sequences
    that can train together: all start from versions that exist before the sequence, and
    no client arrives twice in it.
    """
    runs = []
    begin, existing = 0, received // buffer
    clients: set[int] = set()
    for number, position in enumerate(positions):
        if versions[number] > existing or position in clients:
            runs.append(range(begin, number))
            # All uploads before this one are in by now, and so are the versions that
            # they make.
            begin, existing = number, (received + number) // buffer
            clients.clear()
        clients.add(position)
    return [*runs, range(begin, len(positions))]
