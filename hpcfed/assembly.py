"""Puts a run together on one rank: data, placement, network, engine, federation."""

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from hpcfed import methods
from hpcfed.clients.engine import Engine
from hpcfed.clients.lockstep import Lockstep, RowEngine
from hpcfed.clients.placement import LONGEST, Clients, client_loads, place
from hpcfed.config import RunConfig, Settings
from hpcfed.data.datasets import Dataset, Split, SyntheticSize, load
from hpcfed.data.partition import Partition, partition
from hpcfed.data.shards import Shard, join, part, shard
from hpcfed.federation import Federation, Shards
from hpcfed.methods import Method
from hpcfed.models.layout import Layout
from hpcfed.models.networks import build
from hpcfed.record.timing import Timer
from hpcfed.runtime.collectives import Collectives
from hpcfed.runtime.world import World


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
    shards: Shards | None = None
    """Gathers the data of clients that come from another rank; None when clients stay where they are."""
    gather_seconds: float = 0.0
    """What it took to gather the data of this rank's clients."""
    stacked: int = 1
    """Seeds that advance together with this one, itself included."""


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
    parts: Partition
    holdings: tuple[_Holding, _Holding, _Holding]
    """Training data, test data, and this rank's share of the global test set."""
    network: nn.Module
    engine: Engine


def assemble(settings: Settings, world: World, timer: Timer) -> Setup:
    config = settings.config
    set_arithmetic(config)
    material = _material(config, _load(config, world), world)

    def gather(own: _Holding) -> Shard:
        return shard(material.dataset, own.split, own.lists, clients=own.ids, device=world.device, dtype=_dtype(config))

    def shards(split: Split, ids: np.ndarray) -> Shard:
        lists = material.parts.train if split == "train" else material.parts.test
        return gather(_Holding(split, [lists[i] for i in ids], ids))

    begin = time.perf_counter()
    held = [gather(own) for own in material.holdings]
    gather_seconds = time.perf_counter() - begin
    setup = _setup(settings, world, timer, material, held, material.engine, Collectives(world))
    if config.movable and world.num_workers > 1:
        setup.shards, setup.gather_seconds = shards, gather_seconds
    return setup


def assemble_seeds(settings: Sequence[Settings], world: World, timers: Sequence[Timer]) -> tuple[Lockstep, list[Setup]]:
    """Runs that differ in their seed alone: they share the engine, and images are on the device once for all."""
    configs = [one.config for one in settings]
    set_arithmetic(configs[0])
    shared = None if configs[0].dataset == "synthetic" else _load(configs[0], world)
    materials = [_material(config, shared or _load(config, world), world) for config in configs]
    seeds = [config.seed for config in configs]
    shards = _shards_of_seeds(materials, seeds, device=world.device, dtype=_dtype(configs[0]))
    engine = materials[0].engine  # it knows the network's structure alone, which no seed changes
    lockstep = Lockstep(engine, seeds, timers)
    setups = [
        _setup(one, world, seed.timer, material, own, seed, Collectives(world, turn=seed.turn))
        for one, seed, material, own in zip(settings, lockstep.seeds, materials, shards, strict=True)
    ]
    for setup in setups:
        setup.stacked = len(setups)
    return lockstep, setups


def _material(config: RunConfig, dataset: Dataset, world: World) -> _Material:
    parts = _partition(config, dataset)
    network = build(config.network(), shape=dataset.shape, classes=dataset.classes, seed=config.seed)
    engine = Engine(
        network,
        Layout.of(network),
        shape=dataset.shape,
        mode=config.engine,
        bf16=config.precision == "bf16",
    )
    clients = _place(config, parts, world, longest=LONGEST[engine.mode])
    here = clients.on(world.role_rank)
    own_share = np.arange(world.role_rank, len(dataset.labels("test")), world.role_size)
    return _Material(
        dataset,
        clients,
        parts,
        (
            _Holding("train", [parts.train[i] for i in here], here),
            _Holding("test", [parts.test[i] for i in here], here),
            _Holding("test", [own_share], np.zeros(1, np.int64)),
        ),
        network,
        engine,
    )


def _shards_of_seeds(
    materials: Sequence[_Material], seeds: Sequence[int], *, device: torch.device, dtype: torch.dtype
) -> list[list[Shard]]:
    """Three shards for each seed, parts of the three that hold the clients of all seeds."""
    shards: list[list[Shard]] = [[] for _ in materials]
    dataset = materials[0].dataset
    for same in zip(*(material.holdings for material in materials), strict=True):
        names = [
            np.array([f"{i} (seed {seed})" for i in own.ids], object) for seed, own in zip(seeds, same, strict=True)
        ]
        if all(material.dataset is dataset for material in materials):  # then a sample is there once for all seeds
            lists = [samples for own in same for samples in own.lists]
            whole = shard(dataset, same[0].split, lists, clients=np.concatenate(names), device=device, dtype=dtype)
        else:
            whole = join(
                shard(material.dataset, own.split, own.lists, clients=named, device=device, dtype=dtype)
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
) -> Setup:
    config = settings.config
    train_data, test_data, global_test = shards
    federation = Federation(
        config,
        settings.options,
        clients=material.clients,
        train_data=train_data,
        test_data=test_data,
        engine=engine,
        first_row=engine.layout.row(material.network, dtype=_dtype(config)).to(world.device),
        collectives=collectives,
        timer=timer,
    )
    return Setup(
        settings=settings,
        world=world,
        method=methods.load(config.method),
        federation=federation,
        engine=engine,
        collectives=collectives,
        timer=timer,
        clients=material.clients,
        global_test=global_test,
        global_test_size=len(material.dataset.labels("test")),
    )


def _dtype(config: RunConfig) -> torch.dtype:
    return torch.float64 if config.precision == "fp64" else torch.float32


def set_arithmetic(config: RunConfig) -> None:
    """Precision and determinism of this process's kernels."""
    tensor_cores = config.precision in ("bf16", "tf32")
    torch.set_float32_matmul_precision("high" if tensor_cores else "highest")
    torch.backends.cudnn.allow_tf32 = tensor_cores
    torch.backends.cudnn.benchmark = not config.deterministic
    if platform.machine() == "aarch64":
        # Measured on 2 ARM cores: oneDNN takes 1.1 to 2 times as long as torch's own kernels for small batches.
        setattr(torch.backends.mkldnn, "enabled", False)  # noqa: B010 (mypy takes the property for a value)
    if config.deterministic != torch.are_deterministic_algorithms_enabled():  # the call alone imports for two seconds
        torch.use_deterministic_algorithms(config.deterministic)


def _load(config: RunConfig, world: World) -> Dataset:
    """One rank of each host downloads, the others wait for it and read."""

    def load_here(download: bool) -> Dataset:
        size = SyntheticSize(
            shape=config.shape,
            classes=config.synthetic_classes,
            train=config.clients * config.train_per_client,
            test=config.clients * config.test_per_client,
        )
        return load(config.dataset, root=config.root, download=download, seed=config.seed, synthetic=size)

    if not config.download:
        return load_here(False)
    dataset = load_here(True) if world.local_rank == 0 else None
    world.barrier()
    return dataset or load_here(False)


def _partition(config: RunConfig, dataset: Dataset) -> Partition:
    return partition(
        config.partition,
        dataset.labels("train"),
        dataset.labels("test"),
        classes=dataset.classes,
        clients=config.clients,
        seed=config.seed,
        alpha=config.alpha,
        classes_per_client=config.classes_per_client,
        uniform_share=config.uniform_share,
        train_per_client=config.train_per_client,
        test_per_client=config.test_per_client,
        validation=config.validation,
    )


def _place(config: RunConfig, parts: Partition, world: World, *, longest: float) -> Clients:
    """Placed by steps, as long as nothing has been measured; the longest client of a rank counts more."""
    train, test = (np.array([len(indices) for indices in lists]) for lists in (parts.train, parts.test))
    loads = client_loads(train, epochs=config.epochs, batch_size=config.batch_size)
    return Clients(place(loads, world.num_workers, longest=longest), train, test)
