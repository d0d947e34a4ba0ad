"""Who the clients are: those of this rank, and those that take part in a round."""

from typing import Generic, TypeVar

import numpy as np

from hpcfed.clients.placement import Clients
from hpcfed.federation.channel.clock import VirtualClock
from hpcfed.federation.cohort import Cohort, client_weights, shares
from hpcfed.federation.log import OnTrained, RoundLog
from hpcfed.options import Options, RunConfig, weighs_by
from hpcfed.runtime import randomness
from hpcfed.runtime.collectives import Collectives
from hpcfed.runtime.timer import Timer

MethodOptions = TypeVar("MethodOptions", bound=Options, covariant=True)


class Participants(Generic[MethodOptions]):
    """The clients of the federation, as one rank knows them.

    Client ids are global; positions count this rank's clients from 0.
    """

    def __init__(
        self,
        config: RunConfig,
        options: MethodOptions,
        *,
        clients: Clients,
        collectives: Collectives,
        timer: Timer,
        clock: VirtualClock | None = None,
    ) -> None:
        self.config = config
        self.options = options
        self.clients = clients.on(collectives.world.role_rank)
        """Ids of this rank's clients, ascending."""
        self.sizes = clients.train_samples
        """Training samples of every client of the federation."""
        self.weights = client_weights(self.sizes, weighs_by(config, options))
        """What every client of the federation weighs against others: its samples, or 1
        where all weigh alike; 0 without data. A method that weighs clients by itself
        takes these.
        """
        self._round = 0
        self._log = RoundLog()
        """The log of the round in progress, or of the last one."""
        self._rank_of = clients.rank
        self._collectives = collectives
        self._timer = timer
        self._clock = clock

    @property
    def round(self) -> int:
        """The round in progress, or the last one: what is trained outside of rounds
        takes its learning rate and random numbers from it.
        """
        return self._round

    @property
    def num_holders(self) -> int:
        """Clients of the federation that have training data."""
        return int(np.count_nonzero(self.sizes))

    def weight_of(self, cohort: Cohort) -> float:
        """Return the share that the cohort's members have of what all clients of the
        federation weigh together; of nobody with data it is 0.
        """
        total = float(self.weights.sum())
        return float(self.weights[cohort.clients].sum()) / total if total else 0.0

    def generator(self, purpose: str, *numbers: int) -> np.random.Generator:
        """Return random numbers for a decision that all ranks take alike."""
        return randomness.generator(self.config.seed, purpose, *numbers)

    def sample(self, round: int, on_trained: OnTrained | None = None) -> Cohort:
        """Draw the cohort of a round from all clients by --sampling, and begin the
        round's log; `on_trained` gets the rows that local training leaves.

        With a virtual clock more may be invited than count, and only clients that are
        there. Clients without training data take no part: they are sent nothing, send nothing
        and have no weight. A cohort in which nobody has data stays as drawn, leaves all
        rows as they are, and counts as empty; with --privacy central it is empty.
        """
        with self._timer.phase("sample"):
            total = len(self.sizes)
            if self._clock is None:
                count = self.config.cohort_among(total)
                drawn = self._draw(round, np.arange(total), count)
                return self.invite(round, drawn, on_trained)
            count = self.config.invited_among(total)
            now = self._clock.next_moment()
            drawn = self._draw(round, self._clock.available(now), count)
            cohort = self.invite(round, drawn, on_trained)
            if cohort.log.cohort_size:
                cohort.log.clock = self._clock.begin(round, cohort.clients, now)
            return cohort

    def _draw(self, round: int, pool: np.ndarray, count: int) -> np.ndarray:
        """Draw so many of the pool, or all where there are no more; by --sampling
        poisson each with the probability that it has among all clients.
        """
        if self.config.sampling == "poisson":
            return self._draw_each(round, pool, count / len(self.sizes))
        if count >= len(pool):
            return pool
        # Every rank draws the same: the generator knows seed and round alone.
        generator = self.generator("cohort", round)
        drawn = pool[generator.choice(len(pool), count, replace=False)]
        drawn.sort()
        return drawn

    def _draw_each(self, round: int, pool: np.ndarray, rate: float) -> np.ndarray:
        """Draw each of the pool with this probability.

        Where nobody is drawn, it draws again, unless the run is private: there an empty
        round has to be as noisy as any other.
        """
        generator = self.generator("cohort", round)
        while True:
            drawn = pool[generator.random(len(pool)) < rate]
            if len(drawn) or self.config.privacy == "central":
                return drawn

    def invite(
        self, round: int, clients: np.ndarray, on_trained: OnTrained | None = None
    ) -> Cohort:
        """Begin a round with these clients, whose ids ascend, as `sample` begins it with
        those that it draws.
        """
        self._round = round
        holders = clients[self.sizes[clients] > 0]
        log = self._log = RoundLog(cohort_size=len(holders), on_trained=on_trained)
        # One more client must not be able to send those without data away: they would
        # no longer be counted as short updates, all at once.
        if len(holders) or self.config.privacy == "central":
            clients = holders
        return self._cohort(round, clients, log)

    def instead_of(self, cohort: Cohort, clients: np.ndarray) -> Cohort:
        """Return a cohort of these clients, whose ids ascend, in the round of another:
        both share its log.
        """
        return self._cohort(cohort.round, clients, cohort.log)

    def everyone(self, round: int) -> Cohort:
        """Return a cohort of all clients of this federation, such as those that join
        late, with a log of its own.
        """
        self._round = round
        self._log = RoundLog()
        return self._cohort(round, np.arange(len(self.sizes)), self._log)

    def resume_after(self, round: int) -> None:
        """Go on as if this round, counted from 0, had just been done."""
        self._round = round

    def _cohort(self, round: int, clients: np.ndarray, log: RoundLog) -> Cohort:
        hosts = self._rank_of[clients]
        per_rank = []
        for rank in range(self._collectives.size):
            per_rank.append(np.flatnonzero(hosts == rank))
        chosen = per_rank[self._collectives.world.role_rank]
        return Cohort(
            round=round,
            clients=clients,
            weights=shares(self.weights[clients]),
            here=np.searchsorted(self.clients, clients[chosen]),
            chosen=chosen,
            per_rank=per_rank,
            log=log,
        )

    def _num_sending(self, cohort: Cohort) -> int:
        """Return the number of members with training data: what others are said to send
        or get counts for nothing.
        """
        return int(np.count_nonzero(self.sizes[cohort.clients]))
