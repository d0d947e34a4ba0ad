"""Builds the channel between clients and the server that a run has asked for."""

from dataclasses import dataclass

import numpy as np

from hpcfed.clients.placement import Clients
from hpcfed.federation.channel import Memory
from hpcfed.federation.channel.accountant import (
    SampleSpending,
    accountant_of,
    noise_multiplier_of,
)
from hpcfed.federation.channel.channel import Channel, Stage
from hpcfed.federation.channel.clipping import (
    ClipNorm,
    Clipping,
    QuantileStep,
    layer_columns,
)
from hpcfed.federation.channel.clock import VirtualClock
from hpcfed.federation.channel.compression import (
    download_compression,
    upload_compression,
)
from hpcfed.federation.channel.devices import Devices, devices_of
from hpcfed.federation.channel.noise import CentralNoise, LocalNoise
from hpcfed.models.layout import Layout
from hpcfed.options import RunConfig, Settings
from hpcfed.options.channel import CHANNEL
from hpcfed.runtime.collectives import Collectives
from hpcfed.runtime.world import World

COUNT_NOISE = 1 / 20
"""Noise on the share of updates within C (Andrew et al. 2021, Section 3.1)."""


@dataclass
class Privacy:
    """The parts of the channel that make a run private; all None in other runs."""

    clipping: Clipping | None = None
    """What clients do to their updates."""
    local_noise: LocalNoise | None = None
    """What they add to them."""
    server_clipping: Clipping | None = None
    """What the server does to unpacked updates, which may be longer than C."""
    central_noise: CentralNoise | None = None
    """What the server adds to the mean."""


def build_privacy(
    config: RunConfig,
    layout: Layout,
    memory: Memory,
    collectives: Collectives,
    *,
    packed: bool,
) -> Privacy:
    """Return what makes this run private; the same call on every rank. `packed` says
    whether uploads are packed.
    """
    if config.privacy == "none":
        return Privacy()
    multiplier = noise_multiplier_of(config)
    norm = ClipNorm(config.clip_norm, memory)
    layers = layer_columns(layout) if config.clip_per == "layer" else ()
    clipping = Clipping(norm, layers)
    epsilons = None
    if collectives.world.is_root and not config.clips_alone:
        # Computed now, so that no round waits for the accountant.
        epsilons = accountant_of(config).epsilons(multiplier, config.rounds)
    if config.privacy == "local":
        noise = LocalNoise(
            multiplier=multiplier,
            seed=config.seed,
            rounds=config.rounds,
            norm=norm,
            memory=memory,
            num_clients=config.clients,
            epsilons=epsilons,
        )
        return Privacy(clipping, local_noise=noise)
    deviation, step = _on_updates_and_count(config, multiplier, collectives)
    central = CentralNoise(
        deviation=deviation,
        cohort_size=config.cohort_size,
        seed=config.seed,
        rounds=config.rounds,
        clipping=clipping,
        epsilons=epsilons,
        quantile_step=step,
    )
    again = Clipping(norm, layers) if packed else None
    return Privacy(clipping, server_clipping=again, central_noise=central)


def _on_updates_and_count(
    config: RunConfig, multiplier: float, collectives: Collectives
) -> tuple[float, QuantileStep | None]:
    """Return the noise on the mean of updates, divided by C, and what moves C, if
    anything. z covers both together.
    """
    cohort = config.accounted_cohort
    if config.clip_quantile is None:
        return multiplier / cohort, None
    count_noise = 0.0
    if not config.clips_alone:
        # The paper's value, but large enough that noise on updates can make up for it.
        count_noise = max(COUNT_NOISE * cohort, multiplier)
        multiplier = noise_beside_count(multiplier, count_noise)
    step = QuantileStep(
        quantile=config.clip_quantile,
        rate=config.clip_rate,
        deviation=count_noise / cohort,
        cohort_size=config.cohort_size,
        seed=config.seed,
        collectives=collectives,
    )
    return multiplier / cohort, step


def noise_beside_count(multiplier: float, count_noise: float) -> float:
    """Return z_Δ, the noise of the updates, if z covers them and a count with noise
    σ_b: 1 / z² = 1 / z_Δ² + 1 / (2 σ_b)² (Andrew et al. 2021, Theorem 1).
    """
    return (multiplier**-2 - (2 * count_noise) ** -2) ** -0.5


def build_channel(
    settings: Settings,
    *,
    clients: Clients,
    layout: Layout,
    collectives: Collectives,
    attack: Stage | None,
) -> Channel:
    """Return the channel that this run's uploads and downloads pass; the same call on
    every rank.

    `attack` is what malicious clients do. It comes first: they change what they
    trained.
    """
    here = clients.on(collectives.world.role_rank)
    memory = Memory(len(here))
    config = settings.config
    compress = upload_compression(config, layout, memory)
    packed = compress is not None
    privacy = build_privacy(config, layout, memory, collectives, packed=packed)
    made: dict[str, Stage | None] = {
        "attack": attack,
        "clip": privacy.clipping,
        "local noise": privacy.local_noise,
        "compress": compress,
        "clip again": privacy.server_clipping,
    }
    # CHANNEL also names parts that are not stages, such as the mean: they give None.
    stages = [made.get(part) for part in CHANNEL]
    devices = _devices(config, collectives.world)
    clock = None
    # If clients train at their own pace, the method has a timetable instead of a clock.
    if devices is not None and not settings.options.asynchronous:
        holders = np.flatnonzero(clients.train_samples)
        clock = VirtualClock(config, devices, holders, memory)
    spending = None
    if config.sample_noise is not None:
        spending = SampleSpending(config, memory, collectives)
    return Channel(
        stages=tuple(stage for stage in stages if stage is not None),
        packing=download_compression(config, layout, memory, clients.train_samples),
        upload_bytes=None if compress is None else compress.bytes_of,
        after_mean=privacy.central_noise,
        clock=clock,
        spending=spending,
        memory=memory,
        devices=devices,
    )


def _devices(config: RunConfig, world: World) -> Devices | None:
    """Return the root's devices on every rank: other hardware may round a logarithm
    differently, and then ranks would disagree on who is in time.
    """
    if config.devices == "none":
        return None
    devices: Devices = world.role_bcast(devices_of(config) if world.is_root else None)
    return devices
