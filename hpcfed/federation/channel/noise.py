"""Gaussian noise that hides what a client has sent: added to the mean of a round's
updates by a trusted server, or to each update by its client.

Noise is drawn from the run's seed, like all random numbers. It only simulates privacy:
anyone who knows the seed can remove it.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hpcfed.errors import UserError
from hpcfed.federation.channel import Memory
from hpcfed.federation.channel.channel import Upload
from hpcfed.federation.channel.clipping import ClipNorm, Clipping, QuantileStep
from hpcfed.federation.cohort import Cohort
from hpcfed.runtime import randomness
from hpcfed.runtime.device import on_device

NOISE_NUMBERS = 2**22
"""How many numbers of local noise are drawn at a time: 32 MiB of hashes."""


@dataclass
class OnceARound:
    """Refuses a second release in a round: ε counts only one.

    Noise is keyed by the round's number, so a second release would have the same noise,
    and the difference of both would have none. Round numbers must ascend and stay below
    the run's rounds. That bounds the releases of a whole run, whatever a method does
    with its cohorts.
    """

    rounds: int
    """Rounds of the run, for which ε was computed."""
    refusal: str
    _last: int = field(default=-1, init=False)

    def __call__(self, round: int) -> None:
        """Count the release of a round; rounds are numbered from 0."""
        if not self._last < round < self.rounds:
            raise UserError(self.refusal)
        self._last = round


@dataclass
class CentralNoise:
    """Makes the mean of a round's rows private: w + (Σ updates + noise) / K.

    K is the expected number of clients in a round. Clients that were not drawn, were
    late or diverged count as updates of 0, so that their number stays hidden.
    """

    deviation: float
    """Standard deviation of the noise on the mean, divided by C."""
    cohort_size: int
    seed: int
    rounds: int
    """Rounds of the run."""
    clipping: Clipping
    epsilons: np.ndarray | None
    """ε after each round, on the root, which records it; None on other ranks."""
    quantile_step: QuantileStep | None = None

    def __post_init__(self) -> None:
        self._count = OnceARound(
            self.rounds,
            "--privacy central counts one mean a round for its ε, and this method "
            "takes more: fed.mean may be called once in a round",
        )

    def __call__(self, row: Tensor, cohort: Cohort) -> Tensor:
        """Return the private mean; `row` is the mean of the cohort's rows alone."""
        self._count(cohort.round)
        log = cohort.log
        start = _start(cohort, row)
        norm = self.clipping.norm.value(row.device)
        # From the mean over those that came to the sum divided by the expected number:
        # start + (count / K) (mean − start).
        row = torch.lerp(start, row, len(cohort.clients) / self.cohort_size)
        if self.deviation:
            noise = self._noise(row, cohort.round)
            row = row + (self.deviation * norm).to(row.dtype) * noise
        log.clip_norm = norm
        if self.quantile_step is not None:
            self.quantile_step(self.clipping, cohort, row.device)
        if self.epsilons is not None:
            log.epsilon = float(self.epsilons[cohort.round])
        return row

    def _noise(self, row: Tensor, round: int) -> Tensor:
        """Draw a number for each column, by a hash: the same on every rank."""
        server = torch.zeros(1, dtype=torch.int64, device=row.device)
        key = randomness.client_keys(self.seed, "central noise", round, server)
        return randomness.normal(key, len(row))[0].to(row.dtype)


def _start(cohort: Cohort, row: Tensor) -> Tensor:
    """Return the row that updates are relative to; refuse means in which a client may
    weigh more than its share of the sum.
    """
    start = cohort.in_flight.sent_row
    if start is None or start.shape != row.shape:
        raise UserError(
            "--privacy central needs a method that sends one row to all, and takes the "
            "mean of rows with the same columns"
        )
    share = 1 / max(1, len(cohort.clients))
    if not np.allclose(cohort.weights, share, rtol=1e-9, atol=0):
        raise UserError(
            "--privacy central gives clients equal weights, but this method gives "
            "fed.mean others"
        )
    return start


@dataclass
class LocalNoise:
    """Adds noise to every update before it leaves its client."""

    multiplier: float
    """Standard deviation of the noise, divided by C."""
    seed: int
    rounds: int
    """Rounds of the run."""
    norm: ClipNorm
    memory: Memory
    num_clients: int
    """Clients of the federation."""
    epsilons: np.ndarray | None
    """ε after each round that a client takes part in, on the root, which records the
    largest; None on other ranks.
    """
    phase: str = field(default="upload", init=False)

    def __post_init__(self) -> None:
        self._count = OnceARound(
            self.rounds,
            "--privacy local counts one upload of a client a round for its ε, and this "
            "method makes more: fed.upload may be called once in a round",
        )

    def __call__(self, upload: Upload) -> Upload:
        """Return the upload with noise, added in place: clipping made a new matrix."""
        rows, cohort = upload.rows, upload.cohort
        self._count(cohort.round)
        norm = self.norm.value(rows.device)
        cohort.log.clip_norm = norm
        if self.multiplier:
            self._add(rows, cohort, norm)
        participations = self._participations(cohort)
        if self.epsilons is not None:
            cohort.log.epsilon = float(self.epsilons[participations - 1])
        return upload

    def _add(self, rows: Tensor, cohort: Cohort, norm: Tensor) -> None:
        deviation = (self.multiplier * norm).to(rows.dtype)
        ids = on_device(cohort.clients[cohort.chosen], rows.device)
        keys = randomness.client_keys(self.seed, "local noise", cohort.round, ids)
        # A few members at a time: the hashes are twice as large as the rows.
        size = max(1, NOISE_NUMBERS // max(1, rows.shape[1]))
        for first in range(0, len(rows), size):
            block = slice(first, first + size)
            noise = randomness.normal(keys[block], rows.shape[1])
            rows[block] += deviation * noise.to(rows.dtype)

    def _participations(self, cohort: Cohort) -> int:
        """Return how often the most frequent participant has taken part."""
        none = torch.zeros(self.num_clients, dtype=torch.int64)
        counts = self.memory.common("participations", none).clone()
        # The members of all ranks, so that every rank keeps the same counts.
        counts[torch.from_numpy(cohort.clients)] += 1
        self.memory.keep("participations", counts)
        return int(counts.max())
