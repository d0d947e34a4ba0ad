"""Seconds and memory of a round on any number of ranks, from rounds measured on few."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from statistics import fmean

import numpy as np

from hpcfed.analysis.costmodel import Range, fit_cost, ranged
from hpcfed.clients.placement import LONGEST, client_loads, place
from hpcfed.clients.schedule import num_steps
from hpcfed.clients.stacks import CPU_ACTIVATIONS, MEMORY_SHARE, floats_of_client
from hpcfed.options import LocalWork, Settings
from hpcfed.plan.constants import Calibration, MeasuredWork, RoundPoint, Spread
from hpcfed.plan.speeds import LinkSpeed, measured_link, ring_allreduce
from hpcfed.plan.work import FLOAT, length_of, trainings_each
from hpcfed.runtime import randomness

# Who trains what in a round: clients' steps, placed on ranks as in a run.


DRAWS = 16
"""Number of cohorts to draw if a round samples some of the clients."""


@dataclass(frozen=True)
class Load:
    """The busiest rank's work in a round."""

    clients: int
    """Clients that it trains."""
    hosted: int
    """Clients that live there."""
    longest: float
    """Local steps of its longest client."""
    steps: float
    """Local steps of all its clients."""


def rank_loads(
    settings: Settings, work: LocalWork, sizes: np.ndarray, ranks: int, *, mode: str
) -> list[Load]:
    """Return the busiest rank's work in a round: once if all clients take part, else
    for each of some sampled cohorts. `work` is what the method declares.
    """
    config = settings.config
    weights = client_loads(sizes, epochs=config.epochs, batch_size=config.batch_size)
    longest = LONGEST[mode]
    rank_of = place(weights, ranks, longest=longest)
    steps = work.fisher * -(-sizes // config.batch_size)
    for one in work.round:
        steps = steps + one.times * num_steps(sizes, length_of(one))
    steps = steps * trainings_each(settings)
    count = config.num_invited
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
    """Return the work of the rank that ends last, by the placement rule."""
    there = rank_of[cohort]
    totals = np.bincount(there, steps[cohort], ranks)
    most = np.zeros(ranks)
    # `at`, because a rank occurs several times, and plain indexing keeps only its last.
    np.maximum.at(most, there, steps[cohort])
    # The rule by which `place` has put clients there.
    rank = int(np.argmax(totals + weight * most))
    return Load(
        clients=int(np.count_nonzero(there == rank)),
        hosted=int(np.count_nonzero(rank_of == rank)),
        longest=float(most[rank]),
        steps=float(totals[rank]),
    )


TRACE = 1.02
"""From this many times the peak of the start on, a peak counts as caused by clients."""


@dataclass(frozen=True)
class Rates:
    """What a round costs, in seconds."""

    step: float
    """A local step, however many clients take it together."""
    client_step: float
    """Each client's part of it."""
    sharing: float
    """Relative slowdown with each doubling of the ranks that share a machine."""
    fixed: float
    """Other fixed costs of each round."""
    per_client: float
    """Further cost of each client on a rank."""
    per_doubling: float
    """Further cost of each doubling of ranks: small collectives, ranks' figures."""

    def train(self, load: Load | RoundPoint, local: int = 1) -> float:
        """Return the seconds of local training with `local` ranks on a machine."""
        alone = self.step * load.longest + self.client_step * load.steps
        return alone * (1 + self.sharing * log2(local))

    def rest(self, load: Load | RoundPoint, ranks: int) -> float:
        """Return the seconds of the rest, without exchanging rows between ranks."""
        here = self.fixed + self.per_client * load.clients
        return here + self.per_doubling * log2(ranks)


@dataclass(frozen=True)
class Target:
    """The machines that a plan is for."""

    ranks: int
    per_node: int
    """Ranks that share a machine's caches and memory; 1 if each has a GPU."""
    link: LinkSpeed

    @property
    def local(self) -> int:
        """Ranks on the fullest machine."""
        return min(self.ranks, self.per_node)


def fit_rates(points: Sequence[RoundPoint], row_bytes: float, link: LinkSpeed) -> Rates:
    """Fit a round's costs to measured rounds; `link` is that of the measured ranks."""
    alone = [point for point in points if point.ranks == 1]
    train = fit_cost(
        alone,
        lambda point: (point.longest, point.steps),
        lambda point: point.train.middle,
    )
    rest = fit_cost(
        alone, lambda point: (1.0, point.clients), lambda point: point.rest.middle
    )
    step, client_step = train.coefficients
    fixed, per_client = rest.coefficients
    found = Rates(step, client_step, 0.0, fixed, per_client, 0.0)
    slower, added = [], []
    for point in points:
        if point.ranks > 1:
            doublings = log2(point.ranks)
            # Relative to one rank alone, which the rates describe so far.
            slower.append((point.train.middle / found.train(point) - 1) / doublings)
            between = ring_allreduce(row_bytes, point.ranks, link)
            # What neither the ranks' own work nor the bytes between them explain.
            more = point.rest.middle - found.rest(point, 1) - between
            added.append(more / doublings)
    if not slower:
        return found
    return replace(
        found, sharing=max(0.0, fmean(slower)), per_doubling=max(0.0, fmean(added))
    )


@dataclass(frozen=True)
class RoundPlan:
    """The prediction of a round."""

    seconds: Range
    """Seconds without evaluation."""
    train: float
    between: float
    """The part of these seconds in which rows are exchanged between ranks."""
    rest: float
    evaluation: Range
    """Extra seconds of an evaluated round."""
    memory: Range
    """Bytes of the busiest rank."""


def plan_round(
    constants: Calibration, loads: Sequence[Load], target: Target, *, columns: int
) -> RoundPlan:
    """Predict a round whose busiest rank has one of these loads."""
    row_bytes = FLOAT * columns
    here = measured_link(constants.links) or target.link
    between = ring_allreduce(row_bytes, target.ranks, target.link)

    def seconds(points: Sequence[RoundPoint]) -> float:
        rates = fit_rates(points, row_bytes, here)
        each = [
            rates.train(load, target.local) + rates.rest(load, target.ranks)
            for load in loads
        ]
        return fmean(each) + between

    points = constants.rounds
    rates = fit_rates(points, row_bytes, here)
    mean = mean_load(loads)
    return RoundPlan(
        seconds=ranged(
            points,
            seconds,
            lambda: seconds(_at(points, "low")),
            lambda: seconds(_at(points, "high")),
            keep=_enough,
        ),
        train=rates.train(mean, target.local),
        between=between,
        rest=rates.rest(mean, target.ranks),
        evaluation=ranged(
            points,
            lambda some: evaluation(_telling(some, mean), mean),
            lambda: evaluation(points, mean),
            keep=lambda rest: _tells_apart(rest, points, mean),
        ),
        memory=ranged(points, lambda some: memory(some, mean, constants), keep=_enough),
    )


def mean_load(loads: Sequence[Load]) -> Load:
    """Return the mean over sampled cohorts."""
    return Load(
        clients=round(fmean(load.clients for load in loads)),
        # Memory must suffice in every round; seconds add up, so their mean counts.
        hosted=max(load.hosted for load in loads),
        longest=fmean(load.longest for load in loads),
        steps=fmean(load.steps for load in loads),
    )


def evaluation(points: Sequence[RoundPoint], load: Load) -> float:
    """Return the seconds of judging rows that have trained, and then all clients."""
    cost = fit_cost(points, _judged, lambda point: max(point.evaluate, 1e-9))
    return cost(load)


def _judged(load: Load | RoundPoint) -> tuple[float, int, int]:
    """Return the work of an evaluation: once, by row that has trained, by client."""
    return 1.0, load.clients, load.hosted


def _tells_apart(
    some: Sequence[RoundPoint], points: Sequence[RoundPoint], load: Load
) -> bool:
    """Tell whether some points separate as many costs of an evaluation as all do."""
    # The rank of the matrix is the number of costs that the points can separate.
    ranks = []
    for kept in (some, points):
        work = [_judged(point) for point in _telling(kept, load)]
        ranks.append(np.linalg.matrix_rank(work))
    return _enough(some) and ranks[0] == ranks[1]


def _telling(points: Sequence[RoundPoint], load: Load) -> list[RoundPoint]:
    """Return the points that determine the cost of an evaluation: all of them, or only
    the two largest numbers of clients if the load has more clients than were measured.

    Few clients do not fill a GPU, and fit into a core's caches.
    """
    numbers = sorted({point.hosted for point in points})
    if load.hosted <= numbers[-1]:
        return list(points)
    return [point for point in points if point.hosted in numbers[-2:]]


def memory(points: Sequence[RoundPoint], load: Load, constants: Calibration) -> float:
    """Return the peak bytes of a rank: a fixed part, samples of the clients that live
    there, a row of each client it trains, and the training memory of one stack of
    clients.
    """
    work = constants.work
    alone = [point for point in points if point.ranks == 1]
    # The start has its own peak, which hides the memory of few clients.
    least = min(point.memory for point in alone)
    above = [point for point in alone if point.memory > TRACE * least]
    training = fit_cost(
        above if _enough(above) else alone,
        lambda point: (1.0, stacked(constants, point.clients)),
        lambda point: max(
            point.memory - samples_and_rows(work, point), 0.01 * point.memory
        ),
    )
    return max(least, samples_and_rows(work, load) + training(load))


def samples_and_rows(work: MeasuredWork, load: Load | RoundPoint) -> float:
    """Return the bytes of a rank's samples, and of a row of each client it trains."""
    return work.client_bytes * load.hosted + FLOAT * work.columns * load.clients


def stacked(constants: Calibration, clients: int) -> int:
    """Return how many of a rank's clients train together, by the engine's own rule."""
    work, machine = constants.work, constants.machine
    in_flight = work.batch_size * work.activations
    if machine.kind == "cpu":
        most = CPU_ACTIVATIONS / in_flight
    else:
        floats = floats_of_client(columns=work.columns, activations=in_flight)
        # Free memory is what the clients' samples leave; other users of it are unknown.
        free = max(0.0, machine.memory - work.client_bytes * clients)
        most = MEMORY_SHARE * free / (FLOAT * floats)
    # Equal stacks, as `Stacks.cut` makes them.
    stacks = ceil(clients / max(1, int(most)))
    return ceil(clients / stacks)


def _enough(points: Sequence[RoundPoint]) -> bool:
    """Tell whether rounds on one rank separate a fixed cost from one per client."""
    return len({point.clients for point in points if point.ranks == 1}) > 1


def _at(points: Sequence[RoundPoint], which: str) -> list[RoundPoint]:
    """Return the points with the fast or slow rounds in place of the median."""
    found = []
    for point in points:
        train = Spread.exactly(getattr(point.train, which))
        rest = Spread.exactly(getattr(point.rest, which))
        found.append(point.model_copy(update={"train": train, "rest": rest}))
    return found
