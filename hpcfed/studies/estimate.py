"""What a point will cost, before it runs: arithmetic counted on the networks' shapes,
and the time that it may take.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from hpcfed.clients.network import client_layout, client_network, sample_of
from hpcfed.config import RunConfig, Settings
from hpcfed.models.cost import cost
from hpcfed.models.layout import Layout
from hpcfed.server.columns import generated
from hpcfed.server.networks import Autoencoder, Denoiser
from hpcfed.server.options import ServerOptions, server_options
from hpcfed.server.schedule import num_learnings
from hpcfed.studies.plan import Point
from hpcfed.transit.compression import compressor, packed_bytes

UNMEASURED = {"cpu": 5e9, "cuda": 2e13}
"""FLOP/s that a rank is taken to reach as long as nothing has been measured: the order
of size, no more.
"""
START = 8.0
"""Seconds that a run takes to start, as long as nothing has been measured."""
BYTES = 4.0
"""Size of a number of 32 bits."""


@dataclass(frozen=True)
class Work:
    clients: float
    """FLOPs of local training over all rounds and seeds."""
    server: float
    """FLOPs of training the server's model."""
    memory_traffic: float
    """Bytes that training must read and write in the devices' memory at least: every
    layer's output written and read once, and in every step rows read twice, gradients
    written and read, and rows with their momentum read and written.
    """
    sent: float
    """Bytes that clients send and are sent, if they exchange whole rows; packed, where
    the run packs them.
    """


@dataclass(frozen=True)
class Speed:
    flops: float
    """Per second and rank."""
    start: float
    """Seconds before the first round and after the last."""
    measured: int
    """Runs that it was measured on; 0: a guess."""

    def seconds(self, point: Point, work: Work) -> float:
        """Predict the seconds of a run."""
        # Without ranks of its own, the server's model is trained on the clients' ranks.
        server_ranks = point.settings.config.server_ranks or point.ranks
        flops = work.clients / point.ranks + work.server / server_ranks
        return self.start + flops / self.flops


def work(settings: Settings) -> Work:
    """Count the work of a run, over all its rounds and seeds."""
    config = settings.config
    network = client_network(config, seed=0)
    layout = client_layout(config, network)
    sample = cost(network, sample_of(config))
    seeds = len(config.seeds or (0,))
    epochs = seeds * config.rounds * config.epochs
    samples = epochs * _samples_per_round(settings)
    # In a step: rows read twice, gradients written and read, rows read and written, and
    # every moment of the optimiser read and written too.
    moments = 2
    if config.optimiser == "sgd":
        moments = 1 if config.momentum else 0
    per_step = 6 + 2 * moments
    floats = 2 * samples * sample.activations
    floats += per_step * samples / config.batch_size * layout.num_parameters
    sent = seeds * config.rounds * _sent_in_a_round(config, layout)
    return Work(
        clients=2 * samples * sample.training,  # a multiplication and an addition
        server=seeds * _server_flops(settings, layout),
        memory_traffic=BYTES * floats,
        sent=sent if settings.options.uploads else 0.0,
    )


def _sent_in_a_round(config: RunConfig, layout: Layout) -> float:
    """Return the bytes of all whole rows that a round's clients send and are sent."""
    clients = config.invited_among(config.clients)

    def packed(kind: str) -> float:
        # A view of one number: a row of a large network would take its memory.
        row = torch.empty(()).expand(layout.num_columns)
        if kind == "none":
            return BYTES * len(row)
        return packed_bytes(compressor(kind, config, layout, unbiased=True), row)

    # Who is sampled every tenth round is sent ten downloads, or the whole row.
    missed = config.clients / clients
    down = min(packed("none"), missed * packed(config.compress_down))
    return clients * (packed(config.compress) + down)


def speed(measured: Sequence[tuple[Point, Work, float, float]], *, cuda: bool) -> Speed:
    """Derive a speed from finished runs: point, work, seconds of all rounds, and
    seconds of the whole process.
    """
    rates, starts = [], []
    for point, done, rounds, process in measured:
        at_one = Speed(1.0, 0.0, 0).seconds(point, done)  # seconds at 1 FLOP/s
        if rounds > 0 and not math.isnan(at_one):
            rates.append(at_one / rounds)
        if not math.isnan(process):
            starts.append(process - rounds)
    if not rates:
        return Speed(UNMEASURED["cuda" if cuda else "cpu"], START, 0)
    return Speed(
        median(rates),
        median(starts) if starts else START,
        len(rates),
    )


def _samples_per_round(settings: Settings) -> float:
    """Return the samples of all clients that take part, in one epoch; NaN for a data set
    whose size nobody has said.
    """
    config = settings.config
    if config.dataset == "synthetic" or config.partition == "dominant":
        return float(config.cohort_size * config.train_per_client)
    samples = config.data().samples
    if samples is None:
        return math.nan
    clients = config.clients
    if config.partition == "natural":
        # Those that are not chosen keep their samples.
        clients = config.data().owners
    return samples[0] * config.cohort_size / clients


def server_networks(
    options: ServerOptions, layout: Layout
) -> tuple[Autoencoder, Denoiser]:
    """Build the server's networks without any numbers in them."""
    columns = sum(generated(layout, options).widths)
    with torch.device("meta"):
        autoencoder = Autoencoder(
            columns,
            options.size,
            input_noise=0,
            latent_noise=0,
        )
        return autoencoder, Denoiser(options.size)


def _server_flops(settings: Settings, layout: Layout) -> float:
    """Count the FLOPs of training the server's networks."""
    options = server_options(settings)
    if options is None:
        return 0.0
    autoencoder, denoiser = server_networks(options, layout)
    times = num_learnings(options, settings.config.rounds)
    forward = autoencoder.flops() * options.samples("autoencoder")
    forward += denoiser.flops(options.size.latent) * options.samples("denoiser")
    return 3.0 * times * forward  # the backward pass takes twice the forward's
