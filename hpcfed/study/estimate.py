"""What a point will cost, before it runs: arithmetic counted on the networks' shapes,
and the time that it may take.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

from hpcfed.config import Settings
from hpcfed.models.cost import cost
from hpcfed.models.layout import Layout
from hpcfed.models.networks import build
from hpcfed.server.columns import generated
from hpcfed.server.networks import Autoencoder, Denoiser
from hpcfed.server.options import ServerOptions, server_options
from hpcfed.server.schedule import num_learnings
from hpcfed.study.plan import Point

UNMEASURED = {"cpu": 5e9, "cuda": 2e13}
"""FLOP/s that a rank is taken to reach as long as nothing has been measured: the order
of size, no more.
"""
START = 8.0
"""Seconds that a run takes to start, as long as nothing has been measured."""


@dataclass(frozen=True)
class Work:
    clients: float
    """FLOPs of local training over all rounds and seeds."""
    server: float
    """FLOPs of the server's learning."""
    moved: float
    """Bytes that training must move in the devices' memory at least: every layer's
    output written and read once, and in every step rows read twice, gradients written
    and read, and rows with their momentum read and written.
    """
    sent: float
    """Bytes that clients send and are sent, if they exchange whole rows."""


@dataclass(frozen=True)
class Speed:
    flops: float
    """Per second and rank."""
    start: float
    """Seconds before the first round and after the last."""
    measured: int
    """Runs that it was measured on; 0: a guess."""

    def seconds(self, point: Point, work: Work) -> float:
        servers = point.settings.config.server_ranks or point.ranks
        return (
            self.start
            + (work.clients / point.ranks + work.server / servers) / self.flops
        )


def work(settings: Settings) -> Work:
    config, data, network = (
        settings.config,
        settings.config.data(),
        client_network(settings),
    )
    seeds = len(config.seeds or (0,))
    passes = seeds * config.rounds * config.epochs * _samples_per_round(settings)
    layout = Layout.of(network)
    times, each = seeds * config.rounds * config.cohort_size, cost(network, data.shape)
    floats = 2 * passes * each.activations
    floats += (
        (8 if config.momentum else 6)
        * passes
        / config.batch_size
        * layout.num_parameters
    )
    return Work(
        2 * passes * each.training,
        seeds * _learning(settings, layout),
        4.0 * floats,
        2 * 4.0 * times * layout.num_columns if settings.options.uploads else 0.0,
    )


def client_network(settings: Settings) -> nn.Module:
    data = settings.config.data()
    return build(
        settings.config.network(), shape=data.shape, classes=data.classes, seed=0
    )


def speed(measured: Sequence[tuple[Point, Work, float, float]], *, cuda: bool) -> Speed:
    """From finished runs: point, work, seconds of all rounds, and seconds of the whole
    process.
    """
    rates = []
    for point, done, rounds, _ in measured:
        unit = Speed(1.0, 0.0, 0).seconds(point, done)  # what it would take at 1 FLOP/s
        if rounds > 0 and not math.isnan(unit):
            rates.append(unit / rounds)
    if not rates:
        return Speed(UNMEASURED["cuda" if cuda else "cpu"], START, 0)
    starts = [
        process - rounds
        for _, _, rounds, process in measured
        if not math.isnan(process)
    ]
    return Speed(median(rates), median(starts) if starts else START, len(rates))


def _samples_per_round(settings: Settings) -> float:
    """Of all clients that take part, in one epoch; NaN for a data set whose size nobody
    has said.
    """
    config = settings.config
    if config.dataset == "synthetic" or config.partition == "dominant":
        return float(config.cohort_size * config.train_per_client)
    samples = config.data().samples
    if samples is None:
        return math.nan
    return samples[0] * config.cohort_size / config.clients


def server_networks(
    options: ServerOptions, layout: Layout
) -> tuple[Autoencoder, Denoiser]:
    """Without any numbers in them."""
    with torch.device("meta"):
        autoencoder = Autoencoder(
            sum(generated(layout, options).widths),
            options.size,
            input_noise=0,
            latent_noise=0,
        )
        return autoencoder, Denoiser(options.size)


def _learning(settings: Settings, layout: Layout) -> float:
    options, config = server_options(settings), settings.config
    if options is None:
        return 0.0
    autoencoder, denoiser = server_networks(options, layout)
    times = num_learnings(options, config.rounds)
    both = autoencoder.flops() * options.samples("autoencoder")
    both += denoiser.flops(options.size.latent) * options.samples("denoiser")
    return 3.0 * times * both
