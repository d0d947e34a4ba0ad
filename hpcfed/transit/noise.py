"""Gaussian noise that hides what a client has sent: on the mean of a round's updates,
by a server that is trusted, or on each update, by its client.

Noise is drawn from the run's seed, as everything is: it simulates privacy, and whoever
knows the seed can take it off again.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hpcfed.federation.cohort import Cohort
from hpcfed.federation.way import Memory, Upload
from hpcfed.runtime import randomness
from hpcfed.runtime.device import on_device
from hpcfed.transit.clipping import ClipNorm, Clipping, QuantileStep

NOISE_NUMBERS = 2**22
"""Numbers of local noise that are drawn at a time: 32 MiB of hashes."""


@dataclass
class CentralNoise:
    """Makes the mean of a round's rows private: w + (Σ updates + noise) / K.

    K is the number of clients that a round is expected to have. Clients that were not
    drawn, came late or diverged count as updates of 0: so nobody learns how many there
    were.
    """

    deviation: float
    """Standard deviation of the noise on the mean, by C."""
    cohort_size: int
    seed: int
    clipping: Clipping
    epsilons: np.ndarray | None
    """ε after each round; None on all ranks but the root, which records it."""
    quantile_step: QuantileStep | None = None

    def __call__(self, row: Tensor, cohort: Cohort) -> Tensor:
        """Return the private mean; `row` is the mean of the cohort's rows alone."""
        log = cohort.log
        start = log.sent_row
        assert start is not None, "private methods send one row to all"
        norm = self.clipping.norm.value(row.device)
        row = torch.lerp(start, row, len(cohort.clients) / self.cohort_size)
        noise = self._noise(row, cohort.round)
        row = row + (self.deviation * norm).to(row.dtype) * noise
        log.clip_norm = norm
        if self.quantile_step is not None:
            self.quantile_step(self.clipping, cohort, row.device)
        if self.epsilons is not None:
            log.epsilon = float(self.epsilons[cohort.round])
        return row

    def _noise(self, row: Tensor, round: int) -> Tensor:
        """Draw as many numbers as the row has, by a hash: the same on every rank."""
        server = torch.zeros(1, dtype=torch.int64, device=row.device)
        key = randomness.client_keys(self.seed, "central noise", round, server)
        return randomness.normal(key, len(row))[0].to(row.dtype)


@dataclass
class LocalNoise:
    """Adds noise to every update before it leaves its client."""

    multiplier: float
    """Standard deviation of the noise, by C."""
    seed: int
    norm: ClipNorm
    memory: Memory
    num_clients: int
    """Clients of the federation."""
    epsilons: np.ndarray | None
    """ε after each round of a client; None on all ranks but the root, which records the
    largest.
    """
    phase: str = field(default="upload", init=False)

    def __call__(self, upload: Upload) -> Upload:
        """Return the upload with noise on all columns, in place: clipping has made the
        rows anew.
        """
        rows, cohort = upload.rows, upload.cohort
        norm = self.norm.value(rows.device)
        deviation = (self.multiplier * norm).to(rows.dtype)
        ids = on_device(cohort.clients[cohort.chosen], rows.device)
        keys = randomness.client_keys(self.seed, "local noise", cohort.round, ids)
        # A few members at a time: the hashes are twice as large as the rows.
        size = max(1, NOISE_NUMBERS // max(1, rows.shape[1]))
        for first in range(0, len(rows), size):
            block = slice(first, first + size)
            noise = randomness.normal(keys[block], rows.shape[1])
            rows[block] += deviation * noise.to(rows.dtype)
        cohort.log.clip_norm = norm
        participations = self._count(cohort)
        if self.epsilons is not None:
            cohort.log.epsilon = float(self.epsilons[participations - 1])
        return upload

    def _count(self, cohort: Cohort) -> int:
        """Return how often the client has taken part that has done so most."""
        none = torch.zeros(self.num_clients, dtype=torch.int64)
        counts = self.memory.common("participations", none).clone()
        counts[torch.from_numpy(cohort.clients)] += 1
        self.memory.keep("participations", counts)
        return int(counts.max())
