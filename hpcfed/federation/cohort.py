"""The clients of a round, on this rank and on the others."""

from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from hpcfed.federation.log import RoundLog


@dataclass(frozen=True)
class Cohort:
    """The clients that take part in a round, or some of them."""

    round: int
    clients: np.ndarray
    """Ids of the whole cohort, ascending."""
    weights: np.ndarray
    """nᵢ / Σn of the whole cohort; they sum to one."""
    here: np.ndarray
    """The members on this rank, as positions in `Federation.clients`."""
    chosen: np.ndarray
    """The same members, as positions in `clients` and `weights`."""
    per_rank: list[np.ndarray]
    """`chosen` of every worker rank."""
    log: RoundLog = field(default_factory=RoundLog, compare=False)
    """What the round does; cohorts that are made of this one share it."""

    def only(self, kept: np.ndarray) -> tuple[np.ndarray, "Cohort"]:
        """The members at these ascending positions, with weights that sum to one again.

        Beside them: which of this rank's members they are, counted from 0.
        """
        rows = np.flatnonzero(np.isin(self.chosen, kept))
        if len(kept) == len(
            self.clients
        ):  # weights that sum to one but for a rounding must not change
            return rows, self
        return rows, Cohort(
            round=self.round,
            clients=self.clients[kept],
            weights=shares(self.weights[kept]),
            here=self.here[rows],
            chosen=np.searchsorted(kept, self.chosen[rows]),
            per_rank=[
                np.searchsorted(kept, own[np.isin(own, kept)]) for own in self.per_rank
            ],
            log=self.log,
        )

    def others(self, clients: int) -> np.ndarray:
        """Positions of the clients of this rank, which are so many, that do not take
        part.
        """
        return np.setdiff1d(np.arange(clients), self.here)

    def equally(self) -> "Cohort":
        """The same clients with equal weights."""
        return replace(self, weights=shares(np.ones(len(self.clients))))

    def equally_with_data(self) -> "Cohort":
        """The same with equal weights of those that have data: others have trained
        nothing, and count for nothing.
        """
        return replace(self, weights=shares((self.weights > 0).astype(np.float64)))

    def ranks(self) -> np.ndarray:
        """The worker rank of every member."""
        ranks = np.empty(len(self.clients), np.int64)
        for rank, members in enumerate(self.per_rank):
            ranks[members] = rank
        return ranks


@dataclass(frozen=True)
class Sent:
    """Which parts of its row every member of the cohort on this rank sends, where they
    do not send the same.
    """

    parts: Tensor
    """[members, parts], True where it is sent."""
    part_of: Tensor
    """The part that every column belongs to."""

    def columns(self) -> Tensor:
        """The same for every column."""
        return self.parts[:, self.part_of]


def shares(sizes: np.ndarray) -> np.ndarray:
    """nᵢ / Σn; equal shares when nobody has data, so that the mean of untouched rows is
    that row.
    """
    total = sizes.sum()
    return sizes / total if total else np.full(len(sizes), 1 / len(sizes))
