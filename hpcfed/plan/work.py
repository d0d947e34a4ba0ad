"""What a run has to do, counted on shapes before it runs: arithmetic, bytes, memory.

Plans, dry runs of studies and profiles all use these counts. Converting them to seconds
is left to modules with measurements.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from hpcfed.clients.footprint import Footprint, footprint
from hpcfed.clients.network import (
    client_layout,
    described_network,
    keeps_halves,
    sample_of,
)
from hpcfed.clients.schedule import Length, num_samples, num_steps
from hpcfed.clients.stacks import COPIES, COPIES_OVER_HALVES
from hpcfed.federation.channel.compression import compressor, packed_bytes
from hpcfed.federation.training import FLOPS
from hpcfed.models.cost import Cost, cost
from hpcfed.models.frozen import HALF
from hpcfed.models.layout import Layout
from hpcfed.options import RunConfig, Settings, Training
from hpcfed.plan.bank import answer_work, learning_work
from hpcfed.plan.shares import client_size, stored_samples
from hpcfed.server.diffusion import Schedule
from hpcfed.server.networks import (
    Autoencoder,
    Denoiser,
    ServerNetwork,
    num_parameters,
)
from hpcfed.server.options import ServerOptions, server_options
from hpcfed.server.schedule import banked_rows, generated, num_learnings
from hpcfed.server.span import CoordinateDenoiser
from hpcfed.server.token_denoiser import TokenDenoiser
from hpcfed.server.token_layout import TokenLayout

FLOAT = 4.0
"""Bytes of a number in a row."""
FORWARD_AND_BACKWARD = 3.0
"""FLOPs of a step by those of its forward pass: the backward pass takes two."""


@dataclass(frozen=True)
class RunWork:
    """What a whole run has to do."""

    clients: float
    """FLOPs of all local training and fine-tuning, as declared by the method; without
    the updates of new clients, which no run counts either.
    """
    server: float
    """FLOPs of training the server's model."""
    sent: float
    """Bytes sent by and to clients if they exchange whole rows, as compressed."""


@dataclass(frozen=True)
class ClientTraining:
    """The work of one client's training."""

    samples: float = 0.0
    """Samples of all steps; a sample counts once for each step that takes it."""
    steps: float = 0.0
    flops: float = 0.0
    """FLOPs of all steps, and of Fisher information."""


@dataclass(frozen=True)
class NetworkSize:
    """The cost of one sample in one of the server's networks."""

    flops: float
    """FLOPs, forward and backward."""
    activations: float
    stages: int
    parameters: int


def run_work(settings: Settings) -> RunWork:
    """Count the work of a run, over all its rounds and seeds."""
    config = settings.config
    layout = client_layout(config)
    in_round, judged = local_work(settings)
    each = trainings_each(settings)
    rounds = config.rounds * config.num_invited * each * in_round.flops
    evaluations = -(-config.rounds // config.evaluate_every)
    evaluated = config.evaluate_clients or config.clients
    sent = config.num_seeds * config.rounds * _sent_in_a_round(config, layout)
    return RunWork(
        clients=config.num_seeds * (rounds + evaluations * evaluated * judged.flops),
        server=config.num_seeds * _server_flops(settings, layout),
        sent=sent if settings.options.uploads else 0.0,
    )


def local_work(
    settings: Settings, size: float | None = None
) -> tuple[ClientTraining, ClientTraining]:
    """Count what a client trains in a round, and before its evaluation. By default it
    has the mean number of samples over clients.
    """
    config = settings.config
    network = described_network(config)
    layout = client_layout(config, network)
    sample = cost(network, sample_of(config))
    declared = settings.options.local_work(config, layout)
    size = client_size(config) if size is None else size
    in_round = trained(declared.round, size, sample, layout, fisher=declared.fisher)
    return in_round, trained(declared.judged, size, sample, layout)


def trainings_each(settings: Settings) -> float:
    """Return how often an invited client trains in a round, as is expected: in a method
    like FedUmf also for the round before, unless it was invited there.
    """
    if not settings.options.unsampled_train:
        return 1
    return 2 - settings.config.num_invited / settings.config.clients


def trained(
    trainings: Sequence[Training],
    size: float,
    sample: Cost,
    layout: Layout,
    *,
    fisher: int = 0,
) -> ClientTraining:
    """Count what a client with `size` samples trains."""
    samples = steps = flops = 0.0
    for one in trainings:
        multiply_adds = sample.training
        if one.columns is not None:
            columns = one.columns.numpy()
            if not columns.any():
                # Empty, such as the head of a network that is all body.
                continue
            multiply_adds = sample.training_of(layout.trained_by(columns))
        sizes = np.array([size])
        seen = one.times * float(num_samples(sizes, length_of(one))[0])
        samples += seen
        steps += one.times * float(num_steps(sizes, length_of(one))[0])
        flops += FLOPS * seen * multiply_adds
    if fisher:
        # As `federation/training.py` counts it while a run measures it.
        flops += FLOPS * fisher * size * sample.training
    return ClientTraining(samples, steps, flops)


def length_of(one: Training) -> Length:
    """Return the length of a declared training, each time it runs."""
    return Length(one.epochs, one.batch_size, one.steps, one.repeat)


def described_footprint(config: RunConfig, kind: str) -> Footprint | None:
    """Return what clients take over a large frozen network, on a CPU or GPU; None
    without one.
    """
    network = described_network(config)
    halves = keeps_halves(config, torch.device(kind))
    size, copies = (HALF, COPIES_OVER_HALVES) if halves else (2 * HALF, COPIES)
    activations = copies * config.batch_size
    activations *= cost(network, sample_of(config)).activations
    layout = client_layout(config, network)
    return footprint(network, layout, size, activations, config.batch_size)


def memory_traffic(config: RunConfig, *, samples: float, steps: float) -> float:
    """Return the minimum bytes that training reads and writes in the devices' memory.
    Each layer's output is written and read once. In each step, rows are read twice,
    gradients are written and read, and rows with their moments are read and written.
    """
    network = described_network(config)
    layout = client_layout(config, network)
    activations = cost(network, sample_of(config)).activations
    moments = 2
    if config.optimiser == "sgd":
        moments = 1 if config.momentum else 0
    # Twice each: rows in the passes, gradients, and rows in the update.
    per_step = 6 + 2 * moments
    floats = 2 * samples * activations + per_step * steps * layout.num_parameters
    return FLOAT * floats


def _sent_in_a_round(config: RunConfig, layout: Layout) -> float:
    """Return the bytes of all whole rows sent by and to a round's clients."""
    clients = config.num_invited

    def packed(kind: str) -> float:
        # An expanded scalar: a real row of a large network would take its full memory.
        row = torch.empty(()).expand(layout.num_columns)
        if kind == "none":
            return FLOAT * len(row)
        return packed_bytes(compressor(kind, config, layout, unbiased=True), row)

    # A client sampled every tenth round is sent ten downloads, or the whole row.
    missed = config.clients / clients
    down = min(packed("none"), missed * packed(config.compress_down))
    return clients * (packed(config.compress) + down)


def client_bytes(config: RunConfig) -> float:
    """Return the bytes of a client's samples, which are float32 on their device."""
    return FLOAT * stored_samples(config) * prod(config.data().shape)


def network_sizes(
    options: ServerOptions, layout: Layout, *, rows: int
) -> dict[str, NetworkSize]:
    """Return the sizes of the server's networks, without allocating parameters. Those
    of --server-model span depend on the number of banked rows.
    """
    if options.server_model == "span":
        return {"denoiser": _span_size(options, rows)}
    widths = generated(layout, options).widths
    if options.server_model == "tokens":
        return {"denoiser": _token_size(options, widths)}
    columns = sum(widths)
    with torch.device("meta"):
        autoencoder = Autoencoder(columns, options.size, input_noise=0, latent_noise=0)
        denoiser = Denoiser(options.size)
    stages = len(autoencoder.encoder) + len(autoencoder.decoder)
    return {
        "autoencoder": _size_of(autoencoder, stages),
        "denoiser": _size_of(denoiser, len(denoiser.stages) + 1),
    }


def _size_of(network: ServerNetwork, stages: int) -> NetworkSize:
    return NetworkSize(
        flops=FORWARD_AND_BACKWARD * network.flops(),
        activations=network.activations,
        stages=stages,
        parameters=num_parameters(network),
    )


def _token_size(options: ServerOptions, widths: Sequence[int]) -> NetworkSize:
    """Return the size of the denoiser of tokens; a sample is a window of a row."""
    layout = TokenLayout.of(
        widths,
        length=options.size.latent,
        window=options.token_window,
        device=torch.device("cpu"),
    )
    # Computed on the CPU: a product of meta tensors would load torch's compiler.
    schedule = Schedule.linear(options.diffusion_steps, "meta")
    with torch.device("meta"):
        denoiser = TokenDenoiser(layout, options.size, schedule)
    return _size_of(denoiser, len(denoiser.blocks) + 2)


def _span_size(options: ServerOptions, rows: int) -> NetworkSize:
    axes = max(1, rows - 1)
    if options.server_latent is not None:
        axes = min(axes, options.server_latent)
    schedule = Schedule.linear(options.diffusion_steps, "meta")
    with torch.device("meta"):
        denoiser = CoordinateDenoiser(torch.ones(axes), options.size, schedule)
    return _size_of(denoiser, len(denoiser.stages) + 2)


def _server_flops(settings: Settings, layout: Layout) -> float:
    """Count the FLOPs of training the server's networks, and of passes through the
    bank.
    """
    options = server_options(settings)
    if options is None:
        return 0.0
    times = num_learnings(options, settings.config.rounds)
    flops = 0.0
    rows = banked_rows(options, settings.config)
    sizes = network_sizes(options, layout, rows=rows)
    for network, size in sizes.items():
        flops += size.flops * options.samples(network)
    if options.server_model == "span":
        columns = len(generated(layout, options).at)
        clients = settings.config.clients
        flops += learning_work(rows, columns).flops
        flops += answer_work(rows, columns, clients).flops
    return times * flops
