"""Who the clients are: the clients of this rank, and the members of a round."""

from typing import NamedTuple

import numpy as np

from hpcfed.clients.placement import Clients
from hpcfed.federation.channel.clock import VirtualClock
from hpcfed.federation.cohort import Cohort, client_weights, shares
from hpcfed.federation.log import OnTrained, RoundInFlight, RoundLog
from hpcfed.options import RunConfig
from hpcfed.options.privacy import Weighing
from hpcfed.runtime import randomness
from hpcfed.runtime.collectives import Collectives
from hpcfed.runtime.timer import Timer


class _Seats(NamedTuple):
    """Where the members of a cohort are; as in `Cohort`."""

    clients: bytes
    weights: np.ndarray
    here: np.ndarray
    per_rank: list[np.ndarray]


class Participants:
    """The clients of the federation, as one rank knows them.

    Client ids are global; positions count this rank's clients from 0.
    """

    def __init__(
        self,
        config: RunConfig,
        clients: Clients,
        *,
        weighing: Weighing,
        collectives: Collectives,
        timer: Timer,
        clock: VirtualClock | None = None,
    ) -> None:
        self.config = config
        self.clients = clients.on(collectives.world.role_rank)
        """Ids of this rank's clients, ascending."""
        self.sizes = clients.train_samples
        """Training samples of every client of the federation."""
        self.weights = client_weights(self.sizes, weighing)
        """Relative weight of every client of the federation: its samples, or 1 if all
        weigh the same; 0 without data. A method that computes its own weights starts
        from these.
        """
        self.weighed = False
        """Whether a method has asked for clients' weights other than by its cohort."""
        self.round = 0
        """The round in progress, or the last one. Training outside of rounds takes its
        learning rate and random numbers from it.
        """
        self.log = RoundLog()
        """The log of that round."""
        self._rank_of = clients.rank
        self._invited: tuple[bytes, np.ndarray] | None = None
        """The last clients that were invited, and those of them that have data."""
        self._seats: _Seats | None = None
        """Where the members of the last cohort are."""
        self.collectives = collectives
        self.timer = timer
        self._clock = clock

    @property
    def num_holders(self) -> int:
        """Clients of the federation that have training data."""
        return int(np.count_nonzero(self.sizes))

    @property
    def stops_at_divergence(self) -> bool:
        """Whether an update that is not finite ends the run."""
        return self.config.on_bad_update == "stop"

    def weight_of(self, cohort: Cohort) -> float:
        """Return the cohort's share of all clients' weight; 0 without data."""
        self.weighed = True
        total = float(self.weights.sum())
        return float(self.weights[cohort.clients].sum()) / total if total else 0.0

    def generator(self, purpose: str, *numbers: int) -> np.random.Generator:
        """Return a generator for a decision that all ranks make alike."""
        return randomness.generator(self.config.seed, purpose, *numbers)

    def sample(
        self,
        round: int,
        on_trained: OnTrained | None = None,
        pool: np.ndarray | None = None,
    ) -> Cohort:
        """Draw the cohort of a round from all clients by --sampling, and begin the
        round's log; `on_trained` gets the rows that local training leaves. Without a
        virtual clock, `pool` may name the clients to draw from.

        With a virtual clock only available clients are invited, and possibly more than
        will count. Clients without training data do not take part: they are sent
        nothing, send nothing and have no weight. If no drawn client has data, the
        cohort stays as drawn, leaves all rows unchanged, and counts as empty; with
        --privacy central it is empty.
        """
        with self.timer.phase("sample"):
            total = len(self.sizes)
            if self._clock is None:
                count = self.config.cohort_among(total)
                pool = np.arange(total) if pool is None else pool
                drawn = self._draw(round, pool, count)
                return self.invite(round, drawn, on_trained)
            count = self.config.invited_among(total)
            # Virtual time may jump here, over hours in which every client is away.
            now = self._clock.next_moment()
            drawn = self._draw(round, self._clock.available(now), count)
            cohort = self.invite(round, drawn, on_trained)
            if cohort.log.cohort_size:
                cohort.in_flight.clock = self._clock.begin(round, cohort.clients, now)
            return cohort

    def _draw(self, round: int, pool: np.ndarray, count: int) -> np.ndarray:
        """Draw `count` clients of the pool, or all if it has fewer. With --sampling
        poisson, draw each with the probability that it has among all clients.
        """
        if self.config.sampling == "poisson":
            return self._draw_each(round, pool, count / len(self.sizes))
        if count >= len(pool):
            return pool
        # Every rank draws the same: the generator depends only on seed and round.
        generator = self.generator("cohort", round)
        drawn = pool[generator.choice(len(pool), count, replace=False)]
        # All code relies on ascending ids: sums are in this order, and searchsorted
        # needs it.
        drawn.sort()
        return drawn

    def _draw_each(self, round: int, pool: np.ndarray, rate: float) -> np.ndarray:
        """Draw each client of the pool with this probability.

        Repeat an empty draw, unless the run is private: there an empty round must be as
        noisy as any other.
        """
        generator = self.generator("cohort", round)
        while True:
            drawn = pool[generator.random(len(pool)) < rate]
            if len(drawn) or self.config.privacy == "central":
                return drawn

    def invite(
        self, round: int, clients: np.ndarray, on_trained: OnTrained | None = None
    ) -> Cohort:
        """Begin a round with these clients, whose ids ascend, as `sample` does."""
        self.round = round
        holders = self._with_data(clients)
        self.log = RoundLog(cohort_size=len(holders))
        in_flight = RoundInFlight(on_trained=on_trained)
        # In a private run, one more client with data must not change who else is a
        # member: clients without data count as short updates, and all would drop out.
        if len(holders) or self.config.privacy == "central":
            clients = holders
        return self._cohort(round, clients, self.log, in_flight)

    def _with_data(self, clients: np.ndarray) -> np.ndarray:
        """Return those of the clients that have training data."""
        # Bytes are compared in less than a tenth of the time that arrays take.
        asked = clients.tobytes()
        if self._invited is None or self._invited[0] != asked:
            self._invited = asked, clients[self.sizes[clients] > 0]
        return self._invited[1].copy()

    def instead_of(self, cohort: Cohort, clients: np.ndarray) -> Cohort:
        """Return a cohort of other clients, ascending, that shares this one's log."""
        self.weighed = True  # as in `everyone`
        return self._cohort(cohort.round, clients, cohort.log, cohort.in_flight)

    def everyone(self, round: int) -> Cohort:
        """Return a cohort of all clients of this federation, with its own log."""
        self.weighed = True  # the caller has their weights
        self.round = round
        self.log = RoundLog()
        everyone = np.arange(len(self.sizes))
        return self._cohort(round, everyone, self.log, RoundInFlight())

    def relocated(self, clients: Clients) -> None:
        """Update which clients each rank has."""
        self.clients = clients.on(self.collectives.world.role_rank)
        self._rank_of = clients.rank
        self._seats = None

    def _cohort(
        self, round: int, clients: np.ndarray, log: RoundLog, in_flight: RoundInFlight
    ) -> Cohort:
        # Often the same clients as in the last round, for example all of them.
        known = clients.tobytes()
        if self._seats is None or self._seats.clients != known:
            self._seats = self._seats_of(clients)
        seats = self._seats
        # Copies: a method may change its cohort's arrays.
        return Cohort(
            round=round,
            clients=clients,
            weights=seats.weights.copy(),
            here=seats.here.copy(),
            chosen=seats.per_rank[self.collectives.world.role_rank].copy(),
            per_rank=[chosen.copy() for chosen in seats.per_rank],
            log=log,
            in_flight=in_flight,
        )

    def _seats_of(self, clients: np.ndarray) -> "_Seats":
        hosts = self._rank_of[clients]
        per_rank = []
        for rank in range(self.collectives.size):
            per_rank.append(np.flatnonzero(hosts == rank))
        chosen = per_rank[self.collectives.world.role_rank]
        # From ids to positions among this rank's clients, which ascend, too.
        here = np.searchsorted(self.clients, clients[chosen])
        weights = shares(self.weights[clients])
        return _Seats(clients.tobytes(), weights, here, per_rank)

    def num_holders_in(self, cohort: Cohort) -> int:
        """Return the number of members with training data, who have traffic."""
        return int(np.count_nonzero(self.sizes[cohort.clients]))
