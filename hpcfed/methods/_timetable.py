"""When clients that train at their own pace start and arrive, and from which version of
the server's row each of them starts.

Virtual seconds follow from devices, steps and bytes, never from what is learnt. So all
arrivals of a round are known before anybody trains, the same on every rank, and clients
whose starts exist can train together.

- `places` clients train at any time. When one arrives, or would have arrived, another
  is invited: uniformly from the clients that have data, are there, and do not train.
- The server makes a version of its row of every `buffer` uploads.
- Two that arrive at the same moment arrive in the order of their ids.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import isfinite
from typing import NamedTuple

import numpy as np

from hpcfed.errors import UserError
from hpcfed.federation.way import Presence

Draw = Callable[[], float]
"""Returns a random number in [0, 1)."""


class Training(NamedTuple):
    """A client that trains; in the order of arrival."""

    seconds: float
    """Virtual time at which its upload arrives, or would have arrived."""
    client: int
    version: int
    """The version of the server's row that it has started from."""
    lost: bool
    """Whether its upload never comes."""


class Arrival(NamedTuple):
    """An upload that the server has received."""

    seconds: float
    client: int
    version: int
    """The version that it has started from."""
    staleness: int
    """Versions that the server has made since."""


@dataclass(frozen=True)
class Pace:
    """What decides on starts and arrivals."""

    holders: np.ndarray
    """Ids of the clients that have data, ascending."""
    seconds: np.ndarray
    """What each of them takes from its invitation to the arrival of its upload."""
    places: int
    """Clients that train at the same time, where there are so many."""
    buffer: int = 1
    """Uploads of which the server makes a version."""
    dropout_rate: float = 0.0
    """Probability that an upload never comes."""
    presence: Presence | None = None
    """None: all of them are always there."""


class Timetable:
    """The clients that train, at one moment of virtual time after the other."""

    def __init__(
        self,
        pace: Pace,
        training: Iterable[Training] = (),
        *,
        now: float = 0.0,
        received: int = 0,
    ) -> None:
        """Go on at virtual time `now`, after so many uploads have been `received`."""
        self.now = now
        self.received = received
        self.lost = 0
        """Uploads that never came, since this timetable goes on."""
        self._pace = pace
        self._next = list(training)
        heapify(self._next)
        ids = [one.client for one in self._next]
        positions = np.searchsorted(pace.holders, np.array(ids, np.int64)).tolist()
        self._position = dict(zip(ids, positions, strict=True))
        """Where those that train are among the holders."""
        self._busy = sorted(positions)
        """The same positions, ascending."""

    @property
    def version(self) -> int:
        """The number of versions that the server has made of uploads."""
        return self.received // self._pace.buffer

    @property
    def training(self) -> list[Training]:
        """Those that train now, in the order in which they will arrive."""
        return sorted(self._next)

    def receive(self, uploads: int, draw: Draw) -> list[Arrival]:
        """Go on until so many uploads have arrived, and return them in that order."""
        arrivals: list[Arrival] = []
        self._invite(draw)
        while len(arrivals) < uploads:
            one = self._pop()
            if one.lost:
                self.lost += 1
            else:
                staleness = self.version - one.version
                arrival = Arrival(one.seconds, one.client, one.version, staleness)
                arrivals.append(arrival)
                self.received += 1
            self._invite(draw)
        return arrivals

    def _pop(self) -> Training:
        """Go to the next arrival."""
        one = heappop(self._next)
        self.now = one.seconds
        position = self._position.pop(one.client)
        del self._busy[bisect_left(self._busy, position)]
        return one

    def _invite(self, draw: Draw) -> None:
        """Fill all places; one for which nobody is there stays free until the next
        arrival.
        """
        pace = self._pace
        if not self._next and pace.presence is not None:
            # Nobody will arrive: time goes on until somebody is there.
            self.now = pace.presence.next(self.now)
            if not isfinite(self.now):
                raise UserError("no client is ever available again; see the trace")
        while len(self._busy) < pace.places:
            position = self._drawn(draw)
            if position is None:
                return
            client = pace.holders.item(position)
            arrival = self.now + pace.seconds.item(position)
            lost = pace.dropout_rate > 0 and draw() < pace.dropout_rate
            heappush(self._next, Training(arrival, client, self.version, lost))
            self._position[client] = position
            insort(self._busy, position)

    def _drawn(self, draw: Draw) -> int | None:
        """Draw one of those that are there and do not train, by position."""
        if self._pace.presence is not None:
            there = self._pace.presence.at(self.now)
            there[self._busy] = False
            candidates = np.flatnonzero(there)
            if not len(candidates):
                return None
            return int(candidates[int(draw() * len(candidates))])
        idle = len(self._pace.holders) - len(self._busy)
        if not idle:
            return None
        rank = int(draw() * idle)
        # Skip those that train: before busy[i] there are busy[i] − i that do not. No
        # list of all others has to be kept, however many clients there are.
        busy = self._busy
        skipped = bisect_right(range(len(busy)), rank, key=lambda i: busy[i] - i)
        return rank + skipped


def waves(
    arrivals: list[Arrival], *, received: int, buffer: int
) -> Iterator[list[Arrival]]:
    """Cut arrivals, the first of them after so many were `received`, into the longest
    runs that can train together: all start from versions that exist before the run, and
    nobody arrives twice in one.
    """
    run: list[Arrival] = []
    clients: set[int] = set()
    existing = received // buffer
    for number, arrival in enumerate(arrivals):
        if arrival.version > existing or arrival.client in clients:
            yield run
            run, clients = [], set()
            existing = (received + number) // buffer
        run.append(arrival)
        clients.add(arrival.client)
    yield run
