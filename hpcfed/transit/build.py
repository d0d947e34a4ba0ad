"""Builds the way between clients and the server that a run has asked for."""

from hpcfed.clients.placement import Clients
from hpcfed.config import Settings
from hpcfed.federation.way import Memory, Stage, Way
from hpcfed.models.layout import Layout
from hpcfed.runtime.collectives import Collectives
from hpcfed.transit.devices import devices_of


def build_way(
    settings: Settings,
    *,
    clients: Clients,
    layout: Layout,
    collectives: Collectives,
    attack: Stage | None,
) -> Way:
    """Return what uploads and downloads of this run pass; the same call on every rank.

    `attack` is what malicious clients do: they act first, on what they trained.
    """
    here = clients.on(collectives.world.role_rank)
    memory = Memory(len(here))
    stages: list[Stage] = []
    if attack is not None:
        stages.append(attack)
    # Such a method has a timetable of its own.
    asynchronous = settings.options.asynchronous
    devices = devices_of(settings.config) if asynchronous else None
    return Way(stages=tuple(stages), memory=memory, devices=devices)
