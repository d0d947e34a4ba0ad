"""Puts a run together on one rank: data, placement, network, engine, federation."""

import platform
import time
from dataclasses import dataclass

import numpy as np
import torch

from hpcfed import methods
from hpcfed.clients.engine import Engine
from hpcfed.clients.placement import LONGEST, Clients, client_loads, place
from hpcfed.config import RunConfig, Settings
from hpcfed.data.datasets import Dataset, Split, SyntheticSize, load
from hpcfed.data.partition import Partition, partition
from hpcfed.data.shards import Shard, shard
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
    engine: Engine
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


def assemble(settings: Settings, world: World, timer: Timer) -> Setup:
    config = settings.config
    set_arithmetic(config)
    dtype = torch.float64 if config.precision == "fp64" else torch.float32
    dataset = _load(config, world)
    parts = _partition(config, dataset)
    network = build(config.network(), shape=dataset.shape, classes=dataset.classes, seed=config.seed)
    layout = Layout.of(network)
    engine = Engine(
        network,
        layout,
        shape=dataset.shape,
        mode=config.engine,
        batch_size=config.batch_size,
        device=world.device,
    )
    clients = _place(config, parts, world, longest=LONGEST[engine.mode])
    here = clients.on(world.role_rank)

    def gather(split: Split, lists: list[np.ndarray], ids: np.ndarray) -> Shard:
        return shard(dataset, split, lists, clients=ids, device=world.device, dtype=dtype)

    def shards(split: Split, ids: np.ndarray) -> Shard:
        lists = parts.train if split == "train" else parts.test
        return gather(split, [lists[i] for i in ids], ids)

    test_size = len(dataset.labels("test"))
    own_share = np.arange(world.role_rank, test_size, world.role_size)
    collectives = Collectives(world)
    begin = time.perf_counter()
    federation = Federation(
        config,
        settings.options,
        clients=clients,
        train_data=shards("train", here),
        test_data=shards("test", here),
        engine=engine,
        first_row=layout.row(network, dtype=dtype).to(world.device),
        collectives=collectives,
        timer=timer,
    )
    gather_seconds = time.perf_counter() - begin
    return Setup(
        settings=settings,
        world=world,
        method=methods.load(config.method),
        federation=federation,
        engine=engine,
        collectives=collectives,
        timer=timer,
        clients=clients,
        global_test=gather("test", [own_share], np.zeros(1, np.int64)),
        global_test_size=test_size,
        shards=shards if config.movable and world.num_workers > 1 else None,
        gather_seconds=gather_seconds,
    )


def set_arithmetic(config: RunConfig) -> None:
    """Precision and determinism of this process's kernels."""
    torch.set_float32_matmul_precision("high" if config.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = config.precision == "tf32"
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
