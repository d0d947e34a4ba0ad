"""The server's seconds and memory by ranks and ZeRO stage, from steps measured on one
rank.

The time of a step has four parts: its arithmetic at the speed of a large matrix
product, the activations that pass through memory, a fixed part for each stage of the
network, and the optimiser's pass over all parameters. So a small network and the
paper's predict what a large one will take. Ranks share the samples of a step, and
exchange gradients and parameters in rings.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import log

import numpy as np

from hpcfed.analysis.costmodel import LEAST_WIDTH, Range, fit_cost, ranged
from hpcfed.models.layout import Layout
from hpcfed.plan.bank import (
    answer_work,
    bank_exchange,
    bank_memory,
    fit_passes,
    learning_work,
    misfit,
)
from hpcfed.plan.constants import (
    Calibration,
    MeasuredMachine,
    ServerPoint,
    ZeroPreparation,
)
from hpcfed.plan.speeds import LinkSpeed, ring_allreduce, ring_pass
from hpcfed.plan.work import FLOAT, FORWARD_AND_BACKWARD, NetworkSize, network_sizes
from hpcfed.server.options import ServerOptions
from hpcfed.server.schedule import generated, num_steps
from hpcfed.server.zero_memory import promised_memory

PLANNED = ("p-diff", "span")
"""Models of rows whose learning can be planned."""
OPTIMISER_BYTES = 40
"""Bytes that AdamW reads and writes for each parameter in a step: weight, gradient and
two moments are read, all but the gradient written, and the gradient is computed again.
"""


@dataclass(frozen=True)
class StepRates:
    """The costs of a step, in seconds."""

    stage: float
    """A stage of a network, whatever its size."""
    activation: float
    """A number that a stage outputs."""
    machine: MeasuredMachine

    def seconds(self, size: NetworkSize, samples: float) -> float:
        """Return the seconds of a step of `samples` on one rank."""
        optimiser = OPTIMISER_BYTES * size.parameters / self.machine.bytes_per_second
        return (
            self.stage * size.stages
            + self.activation * size.activations * samples
            + size.flops * samples / self.machine.flops
            + optimiser
        )


def _plain(points: Sequence[ServerPoint], network: str = "") -> list[ServerPoint]:
    """Return the points without ZeRO, of all networks or of one."""
    return [
        point
        for point in points
        if not point.zero_stage and network in ("", point.network)
    ]


def fit_steps(points: Sequence[ServerPoint], machine: MeasuredMachine) -> StepRates:
    """Fit the part of the measured steps that the machine's ceilings do not explain."""

    def rest(point: ServerPoint) -> float:
        known = point.flops / machine.flops
        known += OPTIMISER_BYTES * point.parameters / machine.bytes_per_second
        # A network cannot be faster than its ceilings, but a measurement may say so.
        return max(point.seconds - known, 0.05 * point.seconds)

    # ZeRO's share is added separately, by `zero_overhead`.
    cost = fit_cost(
        _plain(points), lambda point: (point.stages, point.activations), rest
    )
    stage, activation = cost.coefficients
    return StepRates(stage, activation, machine)


def unexplained(
    points: Sequence[ServerPoint], rates: StepRates, network: str, flops: float
) -> float:
    """Return the seconds that measured steps of a network took beyond the rates.
    Interpolate between measured sizes by their FLOPs; outside, use the nearest size.

    So a plan for a measured size reproduces the measurement.
    """
    found = []
    for point in _plain(points, network):
        size = NetworkSize(
            flops=point.flops / point.batch,
            activations=point.activations / point.batch,
            stages=point.stages,
            parameters=point.parameters,
        )
        more = point.seconds - rates.seconds(size, point.batch)
        found.append((point.flops, more))
    return _between(found, flops)


def zero_overhead(points: Sequence[ServerPoint], network: str, stage: int) -> float:
    """Return the seconds that a ZeRO stage adds to a step on one rank. They come from
    hooks and launches, so they are the same for networks of any size.
    """
    found = {}
    for point in points:
        if point.network == network:
            # Overwrites earlier points: the largest was measured last.
            found[point.parameters, point.zero_stage] = point.seconds
    added = 0.0
    for (parameters, measured), seconds in found.items():
        if measured == stage and (parameters, 0) in found:
            added = max(added, seconds - found[parameters, 0])
    return added


def zero_preparation(measured: Sequence[ZeroPreparation], stage: int) -> float:
    """Return the seconds that a ZeRO stage adds to building networks.

    What the first one in a process loads is the same for all stages. It was measured
    with the first of them.
    """
    each = [found.seconds for found in measured if found.stage == stage]
    loaded = max((found.first for found in measured), default=0.0)
    return each[0] + loaded if each else 0.0


def exchange(size: NetworkSize, ranks: int, stage: int, link: LinkSpeed) -> float:
    """Return the seconds per step in which ranks exchange gradients and parameters."""
    whole = FLOAT * size.parameters
    # Batch norm over all ranks: one tiny collective each way, whose latency counts.
    norms = 2 * size.stages * ring_allreduce(8, ranks, link)
    if stage < 3:
        # Gradients are summed. From stage 1 on that is a reduce-scatter, and then the
        # new parameters are gathered: the same number of bytes.
        return ring_allreduce(whole, ranks, link) + norms
    # Parameters are gathered for both the forward and the backward pass.
    return 3 * ring_pass(whole, ranks, link) + norms


@dataclass(frozen=True)
class LearningPlan:
    """The prediction of one learning of the server on a number of ranks."""

    ranks: int
    zero_stage: int
    seconds: Range
    exchange: float
    """The part of these seconds in which ranks exchange data."""
    memory: Range
    """Bytes of a server rank."""


def plan_learning(
    constants: Calibration,
    options: ServerOptions,
    layout: Layout,
    *,
    ranks: int,
    zero_stage: int,
    link: LinkSpeed,
    clients: int,
    rows: int,
) -> LearningPlan:
    """Predict one learning from `rows` rows, and the generation of rows for `clients`
    clients.
    """
    sizes = network_sizes(options, layout, rows=rows)
    steps = num_steps(options)
    between = 0.0
    for network in sizes:
        each = exchange(sizes[network], ranks, zero_stage, link)
        between += steps[network] * each
    passes = bank = 0.0
    if options.server_model == "span":
        columns = len(generated(layout, options).at)
        work = learning_work(rows, columns) + answer_work(rows, columns, clients)
        passes = fit_passes(constants.bank)(work.shared(ranks))
        between += bank_exchange(rows, clients, ranks, link)
        bank = bank_memory(
            options, rows=rows, columns=columns, clients=clients, ranks=ranks
        )

    def seconds(points: Sequence[ServerPoint]) -> float:
        rates = fit_steps(points, constants.machine)
        total = between + passes
        for network, size in sizes.items():
            # Ranks share a step's samples, rounded up to whole ones.
            share = -(-options.batch(network) // ranks)
            step = rates.seconds(size, share)
            step += unexplained(points, rates, network, size.flops * share)
            step += zero_overhead(constants.server, network, zero_stage)
            # The first steps capture graphs and choose kernels.
            firsts = [(point.flops, point.first) for point in _plain(points, network)]
            total += steps[network] * step + _between(firsts, size.flops * share)
        total += zero_preparation(constants.zero_preparations, zero_stage)
        return total + _besides(constants, sizes, options, clients)

    doubt = LEAST_WIDTH * (1 + _times_larger(constants, sizes, options))
    doubt += misfit(constants.bank)
    return LearningPlan(
        ranks=ranks,
        zero_stage=zero_stage,
        seconds=ranged(constants.server, seconds, keep=_enough(sizes), width=doubt),
        exchange=between,
        memory=_memory(constants, sizes, options, ranks, zero_stage, doubt, bank),
    )


def _times_larger(
    constants: Calibration, sizes: dict[str, NetworkSize], options: ServerOptions
) -> float:
    """Return how many factors of four a step's work is above the largest measured."""
    work = sum(size.flops * options.batch(name) for name, size in sizes.items())
    measured = {}
    for point in sorted(_plain(constants.server), key=lambda point: point.flops):
        measured[point.network] = point.flops
    return max(0.0, log(work / sum(measured.values()), 4))


def _between(points: Sequence[tuple[float, float]], at: float) -> float:
    """Interpolate between measured sizes; outside, return the nearest one's value."""
    sizes, values = zip(*sorted(points), strict=True)
    # Sizes differ by factors, so interpolate over their logarithms.
    return float(np.interp(log(at), np.log(sizes), values))


def _besides(
    constants: Calibration,
    sizes: dict[str, NetworkSize],
    options: ServerOptions,
    clients: int,
) -> float:
    """Return the seconds of building networks and of generating rows."""
    parameters = sum(size.parameters for size in sizes.values())
    built = _line(
        [(found.parameters, found.seconds) for found in constants.preparations],
        parameters,
    )
    launches, flops = inversion_work(sizes["denoiser"], options, clients)
    each = 0.0
    for found in constants.preparations:
        # What arithmetic does not explain is the launching of kernels.
        left = found.invert - found.flops / constants.machine.flops
        each = max(each, left / found.launches)
    cold = [(found.flops, found.first) for found in constants.preparations]
    first = _between(cold, max(flops, 1.0))
    inverted = first + each * launches + flops / constants.machine.flops
    return constants.server_start + built + inverted


def inversion_work(
    denoiser: NetworkSize, options: ServerOptions, rows: int
) -> tuple[int, float]:
    """Return stages and FLOPs of the passes that generate rows: two in each step."""
    passes = 2 * options.inversion_depth
    forward = denoiser.flops / FORWARD_AND_BACKWARD
    return passes * denoiser.stages, passes * rows * forward


def _line(points: Sequence[tuple[float, float]], at: float) -> float:
    """Fit a fixed cost and a cost per unit to points; return the value at a place."""
    if len({place for place, _ in points}) < 2:
        return max((value for _, value in points), default=0.0)
    cost = fit_cost(
        points, lambda point: (1.0, point[0]), lambda point: max(point[1], 1e-6)
    )
    return cost((at, 0.0))


def _memory(
    constants: Calibration,
    sizes: dict[str, NetworkSize],
    options: ServerOptions,
    ranks: int,
    zero_stage: int,
    doubt: float,
    bank: float,
) -> Range:
    """Return the bytes of a server rank: of the larger network, and of the bank."""
    staged = options.model_copy(update={"zero_stage": zero_stage})

    def most(points: Sequence[ServerPoint]) -> float:
        fixed, per_activation = fit_memory(points)
        found = []
        for network, size in sizes.items():
            share = -(-options.batch(network) // ranks)
            kept = promised_memory(size.parameters, staged, ranks).total
            found.append(fixed + kept + per_activation * size.activations * share)
        return max(found) + bank

    return ranged(constants.server, most, keep=_enough(sizes), width=doubt)


def fit_memory(points: Sequence[ServerPoint]) -> tuple[float, float]:
    """Return the bytes of a process without networks, and those per activation."""
    # Both networks of a size share a process, whose peak is that of the larger one.
    largest: dict[float, ServerPoint] = {}
    for point in sorted(_plain(points), key=lambda point: point.activations):
        # Sorted by activations, so the larger network of a process replaces the
        # smaller.
        largest[point.memory] = point

    def held(point: ServerPoint) -> float:
        state = promised_memory(point.parameters, ServerOptions(), 1).total
        left = point.memory - state
        return max(left, 0.01 * point.memory, 1.0)

    peaks = list(largest.values())
    if len(peaks) == 1:
        # The points cannot separate the two costs, so assume that all memory scales
        # with samples.
        return 0.0, held(peaks[0]) / peaks[0].activations
    cost = fit_cost(peaks, lambda point: (1.0, point.activations), held)
    fixed, each = cost.coefficients
    return fixed, each


def _enough(networks: Iterable[str]) -> Callable[[Sequence[ServerPoint]], bool]:
    """Return a test whether all networks have points in two sizes without ZeRO."""

    def enough(points: Sequence[ServerPoint]) -> bool:
        for network in networks:
            sizes = {point.parameters for point in _plain(points, network)}
            if len(sizes) < 2:
                return False
        return True

    return enough
