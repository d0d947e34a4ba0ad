"""Requests for rows that inversion must beat: what costs nothing to learn, and other
uses of the same model.
"""

from dataclasses import dataclass

import numpy as np
import torch

from hpcfed.server import likeness
from hpcfed.server.messages import KnownRows
from hpcfed.server.rank import ServerRank
from hpcfed.server.requests import NewestRequest


@dataclass(frozen=True, kw_only=True, eq=False)
class Average(NewestRequest[KnownRows]):
    """Return the mean of each client's rows in the bank."""

    def handle(self, rank: ServerRank) -> KnownRows:
        bank = rank.bank(self.seed).content()
        known, means = likeness.mean_rows(bank, self.clients)
        return KnownRows(**self.placed(rank, np.flatnonzero(known), means))


@dataclass(frozen=True, kw_only=True, eq=False)
class Shrink(NewestRequest[KnownRows]):
    """Return the best linear estimate of each client's row from those in the bank."""

    def handle(self, rank: ServerRank) -> KnownRows:
        bank = rank.bank(self.seed).content()
        known, rows = likeness.shrunk_rows(bank, self.clients)
        return KnownRows(**self.placed(rank, np.flatnonzero(known), rows))


@dataclass(frozen=True, kw_only=True, eq=False)
class Halfway(NewestRequest[KnownRows]):
    """Return rows halfway between the mean of each client's rows in the bank and that
    of all clients.
    """

    def handle(self, rank: ServerRank) -> KnownRows:
        bank = rank.bank(self.seed).content()
        known, rows = likeness.halfway_rows(bank, self.clients)
        return KnownRows(**self.placed(rank, np.flatnonzero(known), rows))


@dataclass(frozen=True, kw_only=True, eq=False)
class InvertAverage(NewestRequest[KnownRows]):
    """Generate rows from the mean of each client's rows in the bank by inversion."""

    def handle(self, rank: ServerRank) -> KnownRows:
        order = np.argsort(self.clients)
        bank = rank.bank(self.seed).content()
        known, means = likeness.mean_rows(bank, self.clients[order])
        rows = rank.model(self.seed).invert(means)
        return KnownRows(**self.placed(rank, order[known], rows))


@dataclass(frozen=True, kw_only=True, eq=False)
class AverageInversions(NewestRequest[KnownRows]):
    """Return the mean of several inversions of each client's newest upload, each with
    noise of its own.
    """

    number: int

    def handle(self, rank: ServerRank) -> KnownRows:
        places, uploads = self.newest(rank)
        model = rank.model(self.seed)
        total = torch.zeros_like(uploads)
        for draw in range(self.number):
            total += model.invert(uploads, draw=draw)
        return KnownRows(**self.placed(rank, places, total / self.number))
