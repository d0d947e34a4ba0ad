"""When clients are there: spans of virtual time, once or again in every period."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Availability:
    """The spans of all clients in flat arrays: one entry per span, in any order.

    A client without a span is always there. Spans have a beginning, which belongs to
    them, and an end, which does not.
    """

    num_clients: int
    owner: np.ndarray
    """The client that each span is about."""
    begin: np.ndarray
    """Seconds since the start of the run, or of the client's period."""
    end: np.ndarray
    period: np.ndarray
    """Seconds after which the span comes again; infinity: never."""

    def at(self, now: float) -> np.ndarray:
        """Return which clients are there at this moment, [clients]."""
        there = self._always.copy()
        moment = self._within_period(now)
        covered = (self.begin <= moment) & (moment < self.end)
        there[self.owner[covered]] = True
        return there

    def next(self, now: float) -> float:
        """Return the first moment from `now` on at which some client is there; infinity
        if none ever is again.
        """
        if self.at(now).any():
            return now
        moment = self._within_period(now)
        wait = self.begin - moment
        # Spans that are over come again with the next period, if there is one.
        wait = np.where(wait > 0, wait, wait + self.period)
        following = now + float(wait.min())
        # The sum may be rounded to just before the span, which would never begin.
        while np.isfinite(following) and not self.at(following).any():
            following = float(np.nextafter(following, np.inf))
        return following

    def of(self, rows: np.ndarray) -> "Availability":
        """Return the availability of clients that behave as these do; some may be named
        several times.
        """
        order = np.argsort(self.owner, kind="stable")
        counts = np.bincount(self.owner, minlength=self.num_clients)
        first = np.concatenate([[0], np.cumsum(counts)])
        of_each = counts[rows]
        owner = np.repeat(np.arange(len(rows)), of_each)
        # 0, 1, 2 … within the spans of each client.
        begins = np.cumsum(of_each) - of_each
        number = np.arange(len(owner)) - np.repeat(begins, of_each)
        spans = order[np.repeat(first[rows], of_each) + number]
        return Availability(
            len(rows), owner, self.begin[spans], self.end[spans], self.period[spans]
        )

    @cached_property
    def _always(self) -> np.ndarray:
        """Which clients have no span."""
        always = np.ones(self.num_clients, bool)
        always[self.owner] = False
        return always

    @cached_property
    def _periods(self) -> tuple[np.ndarray, np.ndarray]:
        """The periods that there are, mostly one, and which of them each span has."""
        return np.unique(self.period, return_inverse=True)

    def _within_period(self, now: float) -> np.ndarray:
        periods, which = self._periods
        # x mod infinity is x.
        return np.mod(now, periods)[which]
