"""Builds a run on one rank: data, placement, network, engine, federation."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hpcfed.attacks.tampering import tampering
from hpcfed.clients.dp_sgd import PrivateSteps
from hpcfed.clients.foreseeing import foresee_kernels
from hpcfed.clients.initial import BaseReference, frozen_tensors
from hpcfed.clients.job import RowEngine
from hpcfed.clients.lockstep import Lockstep
from hpcfed.clients.network import base_reference
from hpcfed.clients.placement import Clients
from hpcfed.data.datasets import Dataset, Split
from hpcfed.data.partition import class_counts
from hpcfed.data.shards import Shard
from hpcfed.experiment.data import Dealt, fingerprint, load_dataset
from hpcfed.experiment.materials import (
    Material,
    RankData,
    check_same_constants,
    dtype_of,
    holding_of,
    load_shard,
    load_stacked_shards,
    make_material,
    set_arithmetic,
    threads_for_work,
)
from hpcfed.experiment.own_method import load_method
from hpcfed.experiment.serving import open_transport
from hpcfed.federation.channel.build import build_channel
from hpcfed.federation.channel.channel import Channel
from hpcfed.federation.exchange import Exchange
from hpcfed.federation.federation import Federation
from hpcfed.federation.participants import Participants
from hpcfed.federation.server_side import ServerSide
from hpcfed.federation.training import LocalTraining, Shards
from hpcfed.methods import Method
from hpcfed.models import hugging_face, peft_files
from hpcfed.models.peft_files import AdapterFiles
from hpcfed.options import RunConfig, Settings, weighs_by
from hpcfed.options.metrics import chosen
from hpcfed.runtime import randomness
from hpcfed.runtime.collectives import Collectives
from hpcfed.runtime.starting import starting
from hpcfed.runtime.telemetry import Sampler
from hpcfed.runtime.timer import Timer
from hpcfed.runtime.world import World
from hpcfed.server.options import server_options
from hpcfed.server.schedule import generated

if TYPE_CHECKING:  # most runs have no server's model, and do not load its code
    from hpcfed.server.client import ServerClient
    from hpcfed.server.transport import Transport

MOST_COUNTS = 1_000_000
"""Up to this number of clients times classes, a run records the class counts."""


@dataclass
class Newcomers:
    """Clients that join after the last round: a federation, numbered from 0."""

    federation: Federation
    clients: Clients


@dataclass
class Setup:
    """Everything that one rank needs for the rounds."""

    settings: Settings
    world: World
    method: Method
    federation: Federation
    engine: RowEngine
    collectives: Collectives
    timer: Timer
    clients: Clients
    """Replaced when clients are relocated."""
    global_test: Shard
    """This rank's share of the global test set, as the data of one client."""
    global_test_size: int
    num_outputs: int
    """Classes, size of the vocabulary, or how many numbers are predicted."""
    metrics: tuple[str, ...]
    """The metrics of models."""
    evaluated: np.ndarray
    """Ids of the clients that are evaluated, ascending."""
    dealt: Dealt
    data: str = ""
    """The data set's fingerprint, on the root; empty if options fully describe it."""
    class_counts: np.ndarray | None = None
    """Training samples of every client and class, on the root; None without classes, or
    if there are too many counts.
    """
    shards: Shards | None = None
    """Loads data of clients from other ranks; None if clients never move."""
    threads: int = 1
    """Threads of torch's operators on this rank."""
    gather_seconds: float = 0.0
    """How long it took to load the data of this rank's clients."""
    stacked: int = 1
    """Runs that advance together with this one, itself included."""
    sampler: Sampler | None = None
    """Reads this rank's counters over time, for all runs of the process."""
    newcomers: Newcomers | None = None
    """Clients that join after the last round."""
    frozen: dict[str, Tensor] = field(default_factory=dict)
    """Parameters of the network that are not part of rows, by name."""
    base: BaseReference | None = None
    """Where these parameters are, if the run's files need not hold them."""
    adapters: AdapterFiles | None = None
    """How adapters are written for PEFT; None without adapters that it knows."""


def assemble(settings: Settings, world: World, timer: Timer) -> Setup:
    """Build one run; the same call on every worker."""
    config, device = settings.config, world.device
    # Before anything is computed: the engine tries a user's network below.
    set_arithmetic(config)
    foresee_kernels(config, world)
    dtype = dtype_of(config)
    material = make_material(settings, load_dataset(config, world), world)

    load = partial(load_shard, material.dataset, device=device, dtype=dtype)

    def load_clients(split: Split, ids: np.ndarray) -> Shard:
        return load(holding_of(split, material.dealt.partition, ids))

    # Timed, because relocating clients costs about as much.
    begin = time.perf_counter()
    data = material.holdings.each(load)
    gather_seconds = time.perf_counter() - begin
    starting.reached("samples")
    setup = _Assembly(
        settings=settings,
        world=world,
        timer=timer,
        material=material,
        data=data,
        engine=material.engine,
        collectives=Collectives(world),
        transport=open_transport([settings], material.engine.layout, world),
    ).setup()
    if config.movable and world.num_workers > 1:
        setup.shards, setup.gather_seconds = load_clients, gather_seconds
    return setup


def assemble_stacked(
    settings: Sequence[Settings],
    names: Sequence[str],
    world: World,
    timers: Sequence[Timer],
) -> tuple[Lockstep, list[Setup]]:
    """Build runs that advance in step: seeds of one run, or points of a study.

    They share the engine and one copy of the images on the device. `names` tell them
    apart in messages.
    """
    config = settings[0].config
    set_arithmetic(config)
    foresee_kernels(config, world)
    datasets: dict[int | None, Dataset] = {}
    materials: list[Material] = []
    for one in settings:
        # Synthetic data depends on the seed; any other data set is read once.
        synthetic = config.dataset == "synthetic"
        drawn_by = one.config.seed_of_data if synthetic else None
        if drawn_by not in datasets:
            datasets[drawn_by] = load_dataset(one.config, world)
        # The first run's engine serves all: they have the same network.
        first = materials[0] if materials else None
        materials.append(make_material(one, datasets[drawn_by], world, first))
    check_same_constants(materials, names)
    data = load_stacked_shards(
        materials, names, device=world.device, dtype=dtype_of(config)
    )
    starting.reached("samples")
    engine = materials[0].engine
    lockstep = Lockstep(engine, names, timers)
    transport = open_transport(settings, engine.layout, world)
    # In turn: ranks must call the runs' collectives in the same order, and a server's
    # model is trained in the main thread. Otherwise no run has to wait.
    turns = world.role_size > 1 or transport is not None
    setups = []
    for number, program in enumerate(lockstep.programs):
        collectives = Collectives(world, meet=program.meet)
        if turns:
            collectives = Collectives(world, turn=program.turn, meet=program.meet)
        setup = _Assembly(
            settings=settings[number],
            world=world,
            timer=program.timer,
            material=materials[number],
            data=data[number],
            # To a run, its program is the engine: calls wait there for those of the
            # other runs.
            engine=program,
            collectives=collectives,
            transport=transport,
        ).setup()
        setup.stacked = len(settings)
        setups.append(setup)
    return lockstep, setups


@dataclass(frozen=True)
class _Assembly:
    """What a rank has of one run before it is built."""

    settings: Settings
    world: World
    timer: Timer
    material: Material
    data: RankData[Shard]
    engine: RowEngine
    collectives: Collectives
    transport: "Transport | None"

    def setup(self) -> Setup:
        """Build the run; the same call on every worker."""
        settings, material, world = self.settings, self.material, self.world
        config, dataset = settings.config, material.dataset
        threads = threads_for_work(world, material.engine.cost)
        # After the engine is built, which knows how much work a sample is.
        torch.set_num_threads(threads)
        channel = build_channel(
            settings,
            clients=material.clients,
            layout=self.engine.layout,
            collectives=self.collectives,
            attack=tampering(config, material.dealt.attackers, self.collectives),
        )
        engine = self._training_engine(channel)
        model = self._server_model()
        federation = self._federation(
            material.clients,
            self.data.train,
            self.data.test,
            engine=engine,
            channel=channel,
            model=model,
        )
        return Setup(
            settings=settings,
            world=world,
            method=load_method(config, federation),
            federation=federation,
            engine=engine,
            collectives=self.collectives,
            timer=self.timer,
            clients=material.clients,
            global_test=self.data.global_test,
            global_test_size=dataset.size("test"),
            num_outputs=dataset.classes,
            metrics=chosen(config.metrics, dataset.task),
            evaluated=_evaluated(config, material.clients),
            dealt=material.dealt,
            data=fingerprint(dataset) if world.is_root else "",
            class_counts=_class_counts(material, config) if world.is_root else None,
            threads=threads,
            newcomers=self._newcomers(model),
            frozen=frozen_tensors(material.network, self.engine.layout),
            base=base_reference(config),
            adapters=self._adapters(),
        )

    def _adapters(self) -> AdapterFiles | None:
        config = self.settings.config
        if config.lora is None:
            return None
        base = None
        if hugging_face.is_hugging_face(config.network()):
            base = str(hugging_face.find_folder(config.network()).resolve())
        return peft_files.describe(
            self.material.network,
            self.engine.layout,
            base=base,
            causal=base is not None and config.data().task == "next-token",
        )

    def _training_engine(self, channel: Channel) -> RowEngine:
        """Return the engine that trains clients: by DP-SGD if the run asks for it."""
        config = self.settings.config
        if channel.spending is None or config.sample_noise is None:
            return self.engine
        return PrivateSteps(
            self.engine,
            self.material.network,
            clip=config.sample_clip,
            multiplier=config.sample_noise,
            count=channel.spending.add,
        )

    def _server_model(self) -> "ServerClient | None":
        """Return the client side of the server's model, if the method has one."""
        if self.transport is None or server_options(self.settings) is None:
            return None
        from hpcfed.server.client import ServerClient

        return ServerClient(self.transport, self.settings.config.seed, self.collectives)

    def _newcomers(self, model: "ServerClient | None") -> Newcomers | None:
        """Return the federation of clients that join later. It has no channel, because
        they send nothing, and it does not train by DP-SGD.
        """
        clients, data = self.material.newcomers, self.data
        if clients is None or data.new_train is None or data.new_test is None:
            return None
        federation = self._federation(
            clients,
            data.new_train,
            data.new_test,
            engine=self.engine,
            # An empty channel: nothing is attacked, packed, hidden or timed.
            channel=Channel(),
            model=model,
        )
        return Newcomers(federation, clients)

    def _federation(
        self,
        clients: Clients,
        train_data: Shard,
        test_data: Shard,
        *,
        engine: RowEngine,
        channel: Channel,
        model: "ServerClient | None",
    ) -> Federation:
        config, options = self.settings.config, self.settings.options
        layout, device = self.engine.layout, self.world.device
        of_server = server_options(self.settings)
        columns = None
        if model is not None and of_server is not None:
            columns = generated(layout, of_server).at.to(device)
        # All clients start from these weights, on every rank.
        weights = layout.row(self.material.network, dtype=dtype_of(config))
        members = Participants(
            config,
            clients,
            weighing=weighs_by(config, options),
            collectives=self.collectives,
            timer=self.timer,
            clock=channel.clock,
        )
        training = LocalTraining(
            members,
            train_data=train_data,
            test_data=test_data,
            engine=engine,
            first_row=weights.to(device),
        )
        exchange = Exchange(members, channel)
        validation = self.data.validation
        server_side = ServerSide(
            members, training, exchange, model=model, validation=validation
        )
        return Federation(
            options,
            members=members,
            training=training,
            exchange=exchange,
            server_side=server_side,
            generated=columns,
        )


def _class_counts(material: Material, config: RunConfig) -> np.ndarray | None:
    """Count every client's samples per class, unless that would bloat the record."""
    dataset = material.dataset
    few = config.clients * dataset.classes <= MOST_COUNTS
    if dataset.task != "classification" or not few:
        return None
    # Known clients only; those that join later come after them in the partition.
    lists = material.dealt.partition.train[: config.clients]
    return class_counts(lists, dataset.labels("train"), dataset.classes)


def _evaluated(config: RunConfig, clients: Clients) -> np.ndarray:
    """Return the clients to evaluate: all, or a fixed sample with test data."""
    if config.evaluate_clients is None:
        return np.arange(config.clients)
    holders = np.flatnonzero(clients.test_samples > 0)
    # Keyed by the data's seed: seeds of a study that share their data share the sample.
    generator = randomness.generator(config.seed_of_data, "evaluated clients")
    size = min(config.evaluate_clients, len(holders))
    drawn: np.ndarray = generator.choice(holders, size, replace=False)
    return np.sort(drawn)
