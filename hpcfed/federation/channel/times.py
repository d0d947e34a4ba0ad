"""What the federation asks of a virtual clock; `federation/channel/clock.py` has one.

Times follow from devices, steps and bytes, so that every rank knows those of all
clients. Clients are named by their ids, which ascend.
"""

from typing import Protocol

import numpy as np


class RoundClock(Protocol):
    """The virtual time of one round, in which clients work side by side."""

    def download(
        self, clients: np.ndarray, num_bytes: np.ndarray | float, dense: float
    ) -> None:
        """Count bytes that each of these members is sent: so many, of what would be
        `dense` without packing.
        """

    def train(self, clients: np.ndarray, steps: np.ndarray) -> np.ndarray | None:
        """Count local steps of these members; return how many each has time for, or None
        where all have time for all of them.
        """

    def upload(self, clients: np.ndarray, num_bytes: np.ndarray | float) -> None:
        """Count bytes that each of these members sends."""

    def steps_in_time(self, clients: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Return how many of so many steps each of these members has time for in this
        round.
        """

    def came(self, clients: np.ndarray) -> np.ndarray:
        """Return whose uploads the server has, of these members of an ended round."""

    def table(self) -> dict[str, np.ndarray]:
        """Return what is recorded of every member, by name."""


class Clock(Protocol):
    """The virtual clock of a run."""

    @property
    def now(self) -> float:
        """Virtual seconds since the run's start, at the end of the last round."""

    def next_moment(self) -> float:
        """Return when the next round can begin, mostly as soon as some client is there."""

    @property
    def is_over(self) -> bool:
        """Whether no client will be there any more, so that no round can begin."""

    def available(self, now: float) -> np.ndarray:
        """Return the ids of the clients that are there at this moment."""

    def begin(self, round: int, clients: np.ndarray, now: float) -> RoundClock:
        """Begin a round with these clients."""

    def end(self, round: RoundClock) -> np.ndarray:
        """End a round; return the ids of the clients whose uploads the server has."""

    def skip(self) -> None:
        """End a round in which nobody takes part."""
