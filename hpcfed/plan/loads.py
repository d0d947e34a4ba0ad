"""Who trains what in a round: clients' steps, placed on ranks as a run places them."""

from dataclasses import dataclass

import numpy as np

from hpcfed.clients.placement import LONGEST, client_loads, place
from hpcfed.clients.schedule import num_steps
from hpcfed.experiment.data import deal, load_alone
from hpcfed.options import LocalWork, RunConfig, Settings
from hpcfed.plan.work import length_of, num_trained
from hpcfed.runtime import randomness

DRAWS = 16
"""Cohorts that are drawn where a round samples some of the clients."""


@dataclass(frozen=True)
class Load:
    """A round's work of the busiest rank."""

    clients: int
    """Clients that it trains."""
    hosted: int
    """Clients that live there."""
    longest: float
    """Local steps of its longest client."""
    steps: float
    """Local steps of all its clients."""


def train_sizes(config: RunConfig, *, validates: bool) -> np.ndarray:
    """Return every client's training samples, as a run would deal them out."""
    even = config.dataset == "synthetic" and config.partition == "iid"
    if even or config.partition == "dominant":
        return np.full(config.clients, config.train_per_client)
    dealt = deal(config, load_alone(config), validates=validates)
    lists = dealt.partition.train[: config.clients]
    return np.array([len(samples) for samples in lists])


def rank_loads(
    settings: Settings, work: LocalWork, sizes: np.ndarray, ranks: int, *, mode: str
) -> list[Load]:
    """Return the busiest rank's work in a round: once where all clients take part, else
    for each of some drawn cohorts. `work` is what the method declares.
    """
    config = settings.config
    weights = client_loads(sizes, epochs=config.epochs, batch_size=config.batch_size)
    longest = LONGEST[mode]
    rank_of = place(weights, ranks, longest=longest)
    steps = work.fisher * -(-sizes // config.batch_size)
    for one in work.round:
        steps = steps + one.times * num_steps(sizes, length_of(one))
    count = num_trained(settings)
    everyone = np.arange(len(sizes))
    if count >= len(sizes):
        return [_busiest(everyone, steps, rank_of, ranks, longest)]
    generator = randomness.generator(config.seed, "plan")
    loads = []
    for _ in range(DRAWS):
        cohort = generator.choice(everyone, count, replace=False)
        loads.append(_busiest(cohort, steps, rank_of, ranks, longest))
    return loads


def _busiest(
    cohort: np.ndarray,
    steps: np.ndarray,
    rank_of: np.ndarray,
    ranks: int,
    weight: float,
) -> Load:
    """Return the work of the rank that ends last, by the rule of placement."""
    there = rank_of[cohort]
    totals = np.bincount(there, steps[cohort], ranks)
    most = np.zeros(ranks)
    np.maximum.at(most, there, steps[cohort])
    rank = int(np.argmax(totals + weight * most))
    return Load(
        clients=int(np.count_nonzero(there == rank)),
        hosted=int(np.count_nonzero(rank_of == rank)),
        longest=float(most[rank]),
        steps=float(totals[rank]),
    )
