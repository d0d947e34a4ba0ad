"""Builds the channel between clients and the server that a run has asked for."""

import numpy as np

from hpcfed.clients.placement import Clients
from hpcfed.federation.channel import Memory
from hpcfed.federation.channel.accountant import SampleSpending
from hpcfed.federation.channel.channel import Channel, Stage
from hpcfed.federation.channel.clock import VirtualClock
from hpcfed.federation.channel.compression import (
    download_compression,
    upload_compression,
)
from hpcfed.federation.channel.devices import Devices, devices_of
from hpcfed.federation.channel.privacy import build_privacy
from hpcfed.models.layout import Layout
from hpcfed.options import RunConfig, Settings
from hpcfed.options.channel import CHANNEL
from hpcfed.runtime.collectives import Collectives
from hpcfed.runtime.world import World


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
