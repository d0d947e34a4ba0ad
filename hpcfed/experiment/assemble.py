"""Puts a run together on one rank: data, placement, network, engine, federation."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from hpcfed import methods
from hpcfed.attacks.label_flip import Flipped
from hpcfed.attacks.tampering import tampering
from hpcfed.clients.engine import Engine
from hpcfed.clients.lockstep import Lockstep, RowEngine
from hpcfed.clients.placement import LONGEST, Clients, client_loads, place
from hpcfed.config import RunConfig, Settings, num_new_classes
from hpcfed.data import PartitionPlan
from hpcfed.data.datasets import ArrayDataset, Dataset, Split, SyntheticSize, load
from hpcfed.data.partition import Partition, partition
from hpcfed.data.shards import Shard, join, part, shard
from hpcfed.data.supplement import Supplement, nobody, supplemented
from hpcfed.federation.federation import Federation, Tamper
from hpcfed.federation.training import Shards
from hpcfed.methods import Method
from hpcfed.models.layout import Layout
from hpcfed.models.networks import build
from hpcfed.record.timing import Timer
from hpcfed.runtime import randomness
from hpcfed.runtime.collectives import Collectives
from hpcfed.runtime.device import set_arithmetic
from hpcfed.runtime.world import World
from hpcfed.server.client import ServerClient
from hpcfed.server.columns import generated
from hpcfed.server.options import ServerOptions, check_columns
from hpcfed.server.transport import Colocated, Remote, Transport, serve

VALIDATION_PER_CLASS = 100
"""Samples of a validation set whose size nobody has named."""


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
    global_test: Shard
    """This rank's share of the global test set, as the data of one client."""
    global_test_size: int
    dealt: "Dealt"
    data: str = ""
    """A fingerprint of the data set, on the root; empty for one that its options
    describe.
    """
    shards: Shards | None = None
    """Gathers the data of clients that come from another rank; None when clients stay
    where they are.
    """
    gather_seconds: float = 0.0
    """What it took to gather the data of this rank's clients."""
    stacked: int = 1
    """Seeds that advance together with this one, itself included."""
    newcomers: "Newcomers | None" = None
    """Clients that join after the last round."""


@dataclass
class Newcomers:
    """A federation of its own, whose clients are numbered from 0."""

    federation: Federation
    clients: Clients


@dataclass(frozen=True)
class Dealt:
    """Who has which samples, after the supplement and after attackers have changed
    theirs.
    """

    parts: Partition
    supplement: Supplement
    attackers: np.ndarray
    """Ids."""


@dataclass(frozen=True)
class _Holding:
    """Samples of one split by client, of one seed on this rank."""

    split: Split
    lists: list[np.ndarray]
    ids: np.ndarray


@dataclass(frozen=True)
class _Material:
    """What depends on the seed: who has which data, and the network's first weights."""

    dataset: Dataset
    clients: Clients
    dealt: Dealt
    holdings: tuple[_Holding, ...]
    """Training data, test data, and this rank's share of the global test set; the
    validation set, where the server selects; newcomers' training and test data.
    """
    newcomers: Clients | None
    network: nn.Module
    engine: Engine


def assemble(settings: Settings, world: World, timer: Timer) -> Setup:
    config = settings.config
    _set_arithmetic(config)
    material = _material(settings, _load(config, world), world)

    def gather(own: _Holding) -> Shard:
        return shard(
            material.dataset,
            own.split,
            own.lists,
            clients=own.ids,
            device=world.device,
            dtype=_dtype(config),
        )

    def shards(split: Split, ids: np.ndarray) -> Shard:
        lists = (
            material.dealt.parts.train
            if split == "train"
            else material.dealt.parts.test
        )
        return gather(_Holding(split, [lists[i] for i in ids], ids))

    begin = time.perf_counter()
    held = [gather(own) for own in material.holdings]
    gather_seconds = time.perf_counter() - begin
    collectives = Collectives(world)
    transport = _transport([settings], material.engine.layout, world)
    setup = _setup(
        settings, world, timer, material, held, material.engine, collectives, transport
    )
    if config.movable and world.num_workers > 1:
        setup.shards, setup.gather_seconds = shards, gather_seconds
    return setup


def assemble_seeds(
    settings: Sequence[Settings], world: World, timers: Sequence[Timer]
) -> tuple[Lockstep, list[Setup]]:
    """Runs that differ in their seed alone: they share the engine, and images are on
    the device once for all.
    """
    configs = [one.config for one in settings]
    _set_arithmetic(configs[0])
    shared = None if configs[0].dataset == "synthetic" else _load(configs[0], world)
    materials = [
        _material(one, shared or _load(one.config, world), world) for one in settings
    ]
    seeds = [config.seed for config in configs]
    shards = _shards_of_seeds(
        materials, seeds, device=world.device, dtype=_dtype(configs[0])
    )
    engine = materials[
        0
    ].engine  # it knows the network's structure alone, which no seed changes
    lockstep = Lockstep(engine, seeds, timers)
    transport = _transport(settings, engine.layout, world)
    setups = [
        _setup(
            one,
            world,
            seed.timer,
            material,
            own,
            seed,
            Collectives(world, turn=seed.turn),
            transport,
        )
        for one, seed, material, own in zip(
            settings, lockstep.seeds, materials, shards, strict=True
        )
    ]
    for setup in setups:
        setup.stacked = len(setups)
    return lockstep, setups


def _material(settings: Settings, dataset: Dataset, world: World) -> _Material:
    config = settings.config
    validates = methods.load(config.method).VALIDATES
    dealt = _deal(config, dataset, validated=validates)
    parts = dealt.parts
    network = build(
        config.network(), shape=dataset.shape, classes=dataset.classes, seed=config.seed
    )
    engine = Engine(
        network,
        Layout.of(network),
        shape=dataset.shape,
        mode=config.engine,
        bf16=config.precision == "bf16",
    )
    known = slice(0, config.clients)
    clients = _place(
        config,
        parts.train[known],
        parts.test[known],
        world,
        longest=LONGEST[engine.mode],
    )
    own_share = np.arange(world.role_rank, len(dataset.labels("test")), world.role_size)
    holdings = [
        *_holdings(parts, clients.on(world.role_rank)),
        _Holding("test", [own_share], np.zeros(1, np.int64)),
    ]
    if validates:
        holdings.append(_Holding("train", [parts.validation], np.zeros(1, np.int64)))
    newcomers = None
    if config.new_clients:
        later = slice(config.clients, None)
        newcomers = _place(
            config,
            parts.train[later],
            parts.test[later],
            world,
            longest=LONGEST[engine.mode],
        )
        holdings += _holdings(parts, config.clients + newcomers.on(world.role_rank))
    return _Material(
        dataset, clients, dealt, tuple(holdings), newcomers, network, engine
    )


def _holdings(parts: Partition, ids: np.ndarray) -> list[_Holding]:
    return [
        _Holding("train", [parts.train[i] for i in ids], ids),
        _Holding("test", [parts.test[i] for i in ids], ids),
    ]


def _shards_of_seeds(
    materials: Sequence[_Material],
    seeds: Sequence[int],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> list[list[Shard]]:
    """A shard for each seed and kind of holding, parts of those that hold the clients
    of all seeds.
    """
    shards: list[list[Shard]] = [[] for _ in materials]
    dataset = materials[0].dataset
    for same in zip(*(material.holdings for material in materials), strict=True):
        names = [
            np.array([f"{i} (seed {seed})" for i in own.ids], object)
            for seed, own in zip(seeds, same, strict=True)
        ]
        if all(
            material.dataset is dataset for material in materials
        ):  # then a sample is there once for all seeds
            lists = [samples for own in same for samples in own.lists]
            whole = shard(
                dataset,
                same[0].split,
                lists,
                clients=np.concatenate(names),
                device=device,
                dtype=dtype,
            )
        else:
            whole = join(
                shard(
                    material.dataset,
                    own.split,
                    own.lists,
                    clients=named,
                    device=device,
                    dtype=dtype,
                )
                for material, own, named in zip(materials, same, names, strict=True)
            )
        first = 0
        for own, of_seed in zip(same, shards, strict=True):
            of_seed.append(part(whole, first, own.ids))
            first += len(own.ids)
    return shards


def _setup(
    settings: Settings,
    world: World,
    timer: Timer,
    material: _Material,
    shards: Sequence[Shard],
    engine: RowEngine,
    collectives: Collectives,
    transport: Transport | None,
) -> Setup:
    config = settings.config
    method = methods.load(config.method)
    train_data, test_data, global_test, *more = shards
    validation = more.pop(0) if method.VALIDATES else None
    server = columns = None
    if transport is not None:
        assert isinstance(settings.options, ServerOptions)
        server = ServerClient(transport, config.seed, collectives)
        columns = generated(engine.layout, settings.options).at.to(world.device)
    first_row = engine.layout.row(material.network, dtype=_dtype(config)).to(
        world.device
    )

    def federation(
        clients: Clients,
        train_data: Shard,
        test_data: Shard,
        *,
        tamper: Tamper | None = None,
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
            tamper=tamper,
        )

    setup = Setup(
        settings=settings,
        world=world,
        method=method,
        federation=federation(
            material.clients,
            train_data,
            test_data,
            tamper=tampering(config, material.dealt.attackers, collectives),
        ),
        engine=engine,
        collectives=collectives,
        timer=timer,
        clients=material.clients,
        global_test=global_test,
        global_test_size=len(material.dataset.labels("test")),
        dealt=material.dealt,
        data=_fingerprint(material.dataset) if world.is_root else "",
    )
    if material.newcomers is not None:
        setup.newcomers = Newcomers(
            federation(material.newcomers, *more), material.newcomers
        )
    return setup


def _fingerprint(dataset: Dataset) -> str:
    honest = dataset.honest if isinstance(dataset, Flipped) else dataset
    return honest.fingerprint if isinstance(honest, ArrayDataset) else ""


def _transport(
    settings: Sequence[Settings], layout: Layout, world: World
) -> Transport | None:
    """The way to the server's model, where the method has one; stacked seeds share it.

    A seed counts what it sends on this way, so that the way has collectives of its own,
    whose count nobody reads.
    """
    options = settings[0].options
    if not isinstance(options, ServerOptions):
        return None
    if world.server_ranks:
        return Remote(world)
    seeds = [one.config.seed for one in settings]
    return Colocated(
        generated(layout, options).widths, options, Collectives(world), seeds=seeds
    )


def serve_model(settings: Settings, world: World) -> None:
    """What a server rank does, from its first to its last request."""
    assert isinstance(settings.options, ServerOptions)
    _set_arithmetic(settings.config)
    layout = Layout.of(_network(settings.config))
    widths = generated(layout, settings.options).widths
    serve(
        world,
        widths,
        settings.options,
        seeds=settings.config.seeds or (settings.config.seed,),
    )


def check_network(settings: Settings) -> None:
    """What can be wrong with a method's options and is seen only when the network is
    known.
    """
    options, config = settings.options, settings.config
    if isinstance(options, ServerOptions):
        if (
            options.server == "auto"
        ):  # the device is not known yet: what fits no device is wrong
            options = options.model_copy(update={"server": "small"})
        check_columns(options, len(generated(Layout.of(_network(config)), options).at))
    if options.names_layers:
        options.check_layout(Layout.of(_network(config)), config.network())


def _network(config: RunConfig) -> nn.Module:
    """As clients have it, built without their data."""
    data = config.data()
    return build(
        config.network(), shape=data.shape, classes=data.classes, seed=config.seed
    )


def _dtype(config: RunConfig) -> torch.dtype:
    return torch.float64 if config.precision == "fp64" else torch.float32


def _set_arithmetic(config: RunConfig) -> None:
    set_arithmetic(precision=config.precision, deterministic=config.deterministic)


def _load(config: RunConfig, world: World) -> Dataset:
    """One rank of each host downloads, the others wait for it and read."""

    def load_here(download: bool) -> Dataset:
        size = SyntheticSize(
            shape=config.shape,
            classes=config.synthetic_classes,
            train=(config.clients + config.new_clients) * config.train_per_client,
            test=(config.clients + config.new_clients) * config.test_per_client,
        )
        dataset = load(
            config.dataset,
            root=config.root,
            download=download,
            seed=config.seed,
            synthetic=size,
        )
        return Flipped(dataset) if config.attack == "label-flip" else dataset

    if not config.download:
        return load_here(False)
    dataset = load_here(True) if world.local_rank == 0 else None
    world.role_barrier()
    return dataset or load_here(False)


def _deal(config: RunConfig, dataset: Dataset, *, validated: bool) -> Dealt:
    """`validated`: the method's server needs a validation set, as the supplement does."""
    honest = dataset.honest if isinstance(dataset, Flipped) else dataset
    validation = config.validation or (
        _usual_validation(honest) if validated or config.supplement else 0
    )
    parts, supplement = _partition(config, honest, validation), nobody(config.clients)
    if config.supplement:
        below = config.supplement_below or config.batch_size
        share, seed = config.supplement_share, config.seed
        parts, supplement = supplemented(
            parts, clients=config.clients, below=below, share=share, seed=seed
        )
    drawn = randomness.generator(config.seed, "attackers").permutation(config.clients)
    attackers = np.sort(drawn[: config.num_attackers])
    if isinstance(dataset, Flipped):
        parts = replace(parts, train=dataset.poison(parts.train, attackers))
    return Dealt(parts, supplement, attackers)


def _usual_validation(dataset: Dataset) -> int:
    """Samples: as many of each class, few enough that the rarest class keeps nine of
    ten.
    """
    rarest = np.bincount(dataset.labels("train"), minlength=dataset.classes).min()
    return dataset.classes * max(1, min(VALIDATION_PER_CLASS, int(rarest) // 10))


def _partition(config: RunConfig, dataset: Dataset, validation: int) -> Partition:
    plan = PartitionPlan(
        scheme=config.partition,
        clients=config.clients + config.new_clients,
        classes=dataset.classes,
        seed=config.seed,
        alpha=config.alpha,
        classes_per_client=config.classes_per_client,
        uniform_share=config.uniform_share,
        train_per_client=config.train_per_client,
        test_per_client=config.test_per_client,
        validation=validation,
        new_clients=config.new_clients if config.new_classes else 0,
        new_classes=num_new_classes(dataset.classes, config.new_classes),
    )
    return partition(plan, dataset.labels("train"), dataset.labels("test"))


def dataless_lines(setup: Setup) -> list[str]:
    """Tell how many clients have no data, and what helps; of the first seed, where
    there are several.
    """
    config = setup.settings.config
    helps = "use fewer clients" + (
        " or a larger --alpha" if config.partition == "dirichlet" else ""
    )
    lines = []
    both = {"": setup.clients}
    if setup.newcomers is not None:
        both["new "] = setup.newcomers.clients
    for whose, clients in both.items():
        if clients.train_samples.all() and clients.test_samples.all():
            continue
        untrained, unjudged = (
            int(np.count_nonzero(n == 0))
            for n in (clients.train_samples, clients.test_samples)
        )
        lines.append(
            f"of {len(clients.rank):,} {whose}clients {untrained:,} have no training "
            "data and count for nothing in "
            f"training, {unjudged:,} have no test data and are not judged; {helps}"
        )
    return lines


def _place(
    config: RunConfig,
    train: Sequence[np.ndarray],
    test: Sequence[np.ndarray],
    world: World,
    *,
    longest: float,
) -> Clients:
    """Placed by steps, as long as nothing has been measured; the longest client of a
    rank counts more.
    """
    train_samples, test_samples = (
        np.array([len(indices) for indices in lists]) for lists in (train, test)
    )
    loads = client_loads(
        train_samples, epochs=config.epochs, batch_size=config.batch_size
    )
    return Clients(
        place(loads, world.num_workers, longest=longest), train_samples, test_samples
    )
