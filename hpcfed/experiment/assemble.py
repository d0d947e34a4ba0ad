"""Puts a run together on one rank: data, placement, network, engine, federation."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hpcfed import methods
from hpcfed.attacks.tampering import tampering
from hpcfed.clients.dp_sgd import PrivateSteps
from hpcfed.clients.initial import frozen_tensors
from hpcfed.clients.job import RowEngine
from hpcfed.clients.lockstep import Lockstep
from hpcfed.clients.placement import Clients
from hpcfed.data.datasets import Dataset, Split
from hpcfed.data.partition import class_counts
from hpcfed.data.shards import Shard
from hpcfed.experiment.arithmetic import (
    dtype_of,
    set_arithmetic,
    threads_for_work,
)
from hpcfed.experiment.data import Dealt, fingerprint, load_dataset
from hpcfed.experiment.materials import (
    Material,
    holding_of,
    load_shard,
    load_stacked_shards,
    make_material,
    validates,
)
from hpcfed.experiment.serving import open_transport
from hpcfed.federation.channel.build import build_channel
from hpcfed.federation.channel.channel import Channel
from hpcfed.federation.federation import Federation
from hpcfed.federation.training import Shards
from hpcfed.methods import Method
from hpcfed.options import RunConfig, Settings
from hpcfed.options.metrics import chosen
from hpcfed.runtime import randomness
from hpcfed.runtime.collectives import Collectives
from hpcfed.runtime.timer import Timer
from hpcfed.runtime.world import World
from hpcfed.server.client import ServerClient
from hpcfed.server.columns import generated
from hpcfed.server.options import server_options
from hpcfed.server.transport import Transport

MOST_COUNTS = 1_000_000
"""Clients times classes up to which a run records who has how much of which class."""


@dataclass
class Newcomers:
    """Clients that join after the last round: a federation of its own, whose clients
    are numbered from 0.
    """

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
    """Classes, the vocabulary, or the numbers that are predicted."""
    metrics: tuple[str, ...]
    """What models are judged by."""
    evaluated: np.ndarray
    """Ids of the clients that are evaluated, ascending."""
    dealt: Dealt
    data: str = ""
    """A fingerprint of the data set, on the root; empty for one that its options
    describe.
    """
    class_counts: np.ndarray | None = None
    """Training samples of every client and class, on the root; None where there are no
    classes, or too many counts.
    """
    shards: Shards | None = None
    """Loads the data of clients that come from another rank; None when clients stay
    where they are.
    """
    threads: int = 1
    """Threads of torch's operators on this rank."""
    gather_seconds: float = 0.0
    """What it took to load the data of this rank's clients."""
    stacked: int = 1
    """Runs that advance together with this one, itself included."""
    newcomers: Newcomers | None = None
    """Clients that join after the last round."""
    frozen: dict[str, Tensor] = field(default_factory=dict)
    """Parameters of the network that no row holds, by name."""


def assemble(settings: Settings, world: World, timer: Timer) -> Setup:
    """Put one run together; the same call on every worker."""
    config, device = settings.config, world.device
    set_arithmetic(config)
    dtype = dtype_of(config)
    material = make_material(settings, load_dataset(config, world), world)

    def load_clients(split: Split, ids: np.ndarray) -> Shard:
        held = holding_of(split, material.dealt.partition, ids)
        return load_shard(material.dataset, held, device=device, dtype=dtype)

    # Timed, because relocating clients costs about as much.
    begin = time.perf_counter()
    shards = []
    for held in material.holdings:
        shards.append(load_shard(material.dataset, held, device=device, dtype=dtype))
    gather_seconds = time.perf_counter() - begin
    setup = _setup(
        settings,
        world,
        timer,
        material=material,
        shards=shards,
        engine=material.engine,
        collectives=Collectives(world),
        transport=open_transport([settings], material.engine.layout, world),
    )
    if config.movable and world.num_workers > 1:
        setup.shards, setup.gather_seconds = load_clients, gather_seconds
    return setup


def assemble_stacked(
    settings: Sequence[Settings],
    names: Sequence[str],
    world: World,
    timers: Sequence[Timer],
) -> tuple[Lockstep, list[Setup]]:
    """Put together runs that advance in step: seeds of one, or points of a study.

    They share the engine, and images are on the device once for all of them. `names`
    tell them apart in messages.
    """
    config = settings[0].config
    set_arithmetic(config)
    datasets: dict[int | None, Dataset] = {}
    materials: list[Material] = []
    engine = None
    for one in settings:
        # Synthetic data depends on the seed; any other data set is read once.
        synthetic = config.dataset == "synthetic"
        drawn_by = one.config.seed_of_data if synthetic else None
        if drawn_by not in datasets:
            datasets[drawn_by] = load_dataset(one.config, world)
        material = make_material(one, datasets[drawn_by], world, engine)
        materials.append(material)
        engine = material.engine
    shards = load_stacked_shards(
        materials, names, device=world.device, dtype=dtype_of(config)
    )
    engine = materials[0].engine
    lockstep = Lockstep(engine, names, timers)
    transport = open_transport(settings, engine.layout, world)
    # In turn: ranks must call the runs' collectives in the same order, and a server's
    # model is trained in the main thread. Otherwise nobody need wait.
    turns = world.role_size > 1 or transport is not None
    setups = []
    for number, program in enumerate(lockstep.programs):
        collectives = Collectives(world)
        if turns:
            collectives = Collectives(world, turn=program.turn)
        setup = _setup(
            settings[number],
            world,
            program.timer,
            material=materials[number],
            shards=shards[number],
            engine=program,
            collectives=collectives,
            transport=transport,
        )
        setup.stacked = len(settings)
        setups.append(setup)
    return lockstep, setups


def _setup(
    settings: Settings,
    world: World,
    timer: Timer,
    *,
    material: Material,
    shards: Sequence[Shard],
    engine: RowEngine,
    collectives: Collectives,
    transport: Transport | None,
) -> Setup:
    config = settings.config
    threads = threads_for_work(world, material.engine.cost)
    torch.set_num_threads(threads)
    # In the order of `Material.holdings`: after the three that every run has come
    # the validation set, if the method has one, and the newcomers' data.
    train_data, test_data, global_test, *more = shards
    validation = more.pop(0) if validates(settings) else None
    # Only some methods have a model on the server; it knows some of the columns.
    server = columns = None
    options = server_options(settings)
    if transport is not None and options is not None:
        server = ServerClient(transport, config.seed, collectives)
        columns = generated(engine.layout, options).at.to(world.device)
    # All clients start from these weights, on every rank.
    weights = engine.layout.row(material.network, dtype=dtype_of(config))
    first_row = weights.to(world.device)

    def federation(
        clients: Clients,
        train_data: Shard,
        test_data: Shard,
        engine: RowEngine,
        *,
        channel: Channel | None = None,
    ) -> Federation:
        return Federation(
            config,
            settings.options,
            clients=clients,
            train_data=train_data,
            test_data=test_data,
            engine=engine,
            first_row=first_row,
            collectives=collectives,
            timer=timer,
            server=server,
            generated=columns,
            validation=validation,
            channel=channel,
        )

    forgery = tampering(config, material.dealt.attackers, collectives)
    channel = build_channel(
        settings,
        clients=material.clients,
        layout=engine.layout,
        collectives=collectives,
        attack=forgery,
    )
    trains: RowEngine = engine
    if channel.spending is not None and config.sample_noise is not None:
        trains = PrivateSteps(
            engine,
            material.network,
            clip=config.sample_clip,
            multiplier=config.sample_noise,
            count=channel.spending.add,
        )
    fed = federation(material.clients, train_data, test_data, trains, channel=channel)
    newcomers = None
    if material.newcomers is not None:
        train_data, test_data = more
        # They send nothing.
        joining = federation(material.newcomers, train_data, test_data, engine)
        newcomers = Newcomers(joining, material.newcomers)
    return Setup(
        settings=settings,
        world=world,
        method=methods.load(config.method),
        federation=fed,
        engine=trains,
        collectives=collectives,
        timer=timer,
        clients=material.clients,
        global_test=global_test,
        global_test_size=material.dataset.size("test"),
        num_outputs=material.dataset.classes,
        metrics=chosen(config.metrics, material.dataset.task),
        evaluated=_evaluated(config, material.clients),
        dealt=material.dealt,
        data=fingerprint(material.dataset) if world.is_root else "",
        class_counts=_class_counts(material, config) if world.is_root else None,
        threads=threads,
        newcomers=newcomers,
        frozen=frozen_tensors(material.network, engine.layout),
    )


def _class_counts(material: Material, config: RunConfig) -> np.ndarray | None:
    """Count who has how much of which class, unless the record would grow by it."""
    dataset = material.dataset
    few = config.clients * dataset.classes <= MOST_COUNTS
    if dataset.task != "classification" or not few:
        return None
    lists = material.dealt.partition.train[: config.clients]
    return class_counts(lists, dataset.labels("train"), dataset.classes)


def _evaluated(config: RunConfig, clients: Clients) -> np.ndarray:
    """Return who is evaluated: everyone, or a sample of those who have test data, the
    same in every round.
    """
    if config.evaluate_clients is None:
        return np.arange(config.clients)
    holders = np.flatnonzero(clients.test_samples > 0)
    # By the data's seed: seeds of a study that share their data share the sample.
    generator = randomness.generator(config.seed_of_data, "evaluated clients")
    size = min(config.evaluate_clients, len(holders))
    drawn: np.ndarray = generator.choice(holders, size, replace=False)
    return np.sort(drawn)
