"""What depends on the seed: who has which data on which rank, and first weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import groupby
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import nn

from hpcfed import methods
from hpcfed.clients.engine import Engine
from hpcfed.clients.initial import differing_constant
from hpcfed.clients.network import (
    client_layout,
    client_network,
    network_of_run,
    sample_of,
)
from hpcfed.clients.placement import LONGEST, Clients, client_loads, place
from hpcfed.clients.waiting import WaitingEngine
from hpcfed.data.datasets import Dataset, Split
from hpcfed.data.partition import Partition
from hpcfed.data.shards import Shard, join, shard, sub_shard
from hpcfed.errors import UserError
from hpcfed.experiment.data import Dealt, deal
from hpcfed.models.cost import Cost
from hpcfed.models.frozen import share_frozen
from hpcfed.options import RunConfig, Settings
from hpcfed.runtime import device
from hpcfed.runtime.location import omp_threads
from hpcfed.runtime.starting import starting
from hpcfed.runtime.world import World

SMALL = 500_000
"""Multiply-adds of a sample's training step below which one thread is best on a CPU.

Measured on two cores, two threads against one. Below: mlp and cnn-digits run 0.9 to 1.1
times as fast. Next to another busy process they take 10 times as long, because each of
their many short operators waits for both threads. Above: cnn-fmnist, cnn-cifar and
cnn-pfl run 1.3 to 1.9 times as fast.
"""


def threads_for_work(world: World, cost: Cost) -> int:
    """Return how many of its threads a rank should use for its clients.

    OMP_NUM_THREADS decides if it is set. The number depends on no timing, because
    threads change how sums are rounded: the same run must produce the same figures.
    """
    small = world.device.type == "cpu" and cost.training < SMALL
    return 1 if small and omp_threads() is None else world.threads


def set_arithmetic(config: RunConfig) -> None:
    """Set which kernels this process uses, their precision and determinism."""
    device.set_arithmetic(
        precision=config.precision,
        deterministic=config.deterministic,
        kernels=config.kernels,
    )


def dtype_of(config: RunConfig) -> torch.dtype:
    """Return the type of rows and data; bf16 and tf32 apply only inside kernels."""
    return torch.float64 if config.precision == "fp64" else torch.float32


@dataclass(frozen=True)
class Holding:
    """Samples of one split by client, for one seed on this rank."""

    split: Split
    lists: list[np.ndarray]
    ids: np.ndarray


T = TypeVar("T")
Other = TypeVar("Other")


@dataclass(frozen=True)
class RankData(Generic[T]):
    """The data that a rank loads for a run: first indices, then samples."""

    train: T
    test: T
    global_test: T
    """This rank's share of the whole test set, as the data of one client."""
    validation: T | None = None
    """What the server judges uploads by, if its method selects uploads."""
    new_train: T | None = None
    """Training data of clients that join later, if any do."""
    new_test: T | None = None

    def each(self, make: Callable[[T], Other]) -> "RankData[Other]":
        """Apply a function to each of them."""
        made: dict[str, Any] = {}
        # Field by field, so that a new kind of data needs no change here.
        for name, one in vars(self).items():
            made[name] = None if one is None else make(one)
        return RankData(**made)


@dataclass(frozen=True)
class Material:
    """What depends on the seed."""

    dataset: Dataset
    clients: Clients
    dealt: Dealt
    holdings: RankData[Holding]
    newcomers: Clients | None
    network: nn.Module
    engine: Engine


def validates(settings: Settings) -> bool:
    """Tell whether the method's server has a validation set."""
    return methods.load(settings.config.method).VALIDATES


def make_material(
    settings: Settings, dataset: Dataset, world: World, first: Material | None = None
) -> Material:
    """Deal out the data, build the network, and place the clients on ranks.

    Runs with the same network share the first one's engine, which only knows its
    structure, and its frozen weights.
    """
    config = settings.config
    dealt = deal(config, dataset, validates=validates(settings))
    starting.reached("data")
    network = network_of_run(config, world.device)
    own = config.model_info() is None
    if own:
        check_same_network(config, network, world)
    make_engine: Callable[..., Engine] = Engine
    if config.simulate_training is not None:
        make_engine = partial(WaitingEngine, seconds=config.simulate_training)
    engine = None
    if first is not None:
        share_frozen(network, first.network)
        engine = first.engine
    engine = engine or make_engine(
        network,
        client_layout(config, network),
        shape=dataset.shape,
        mode=config.engine,
        bf16=config.precision == "bf16",
        trial=sample_of(config) if own else None,
        lengths=config.text_lengths,
        batch_size=config.batch_size,
        checkpointing=config.checkpoint_activations,
        device=world.device,
    )
    if config.init is not None and dtype_of(config) is torch.float64:
        # Torch makes networks in float32, which would round given float64 weights.
        network = client_network(config, double=True)
    starting.reached("network")
    # Clients that join later come after all others, and are placed separately.
    partition = dealt.partition
    known = slice(0, config.clients)
    clients = _placed(config, partition, known, world, engine.mode)
    newcomers = None
    if config.new_clients:
        later = slice(config.clients, None)
        newcomers = _placed(config, partition, later, world, engine.mode)
    return Material(
        dataset=dataset,
        clients=clients,
        dealt=dealt,
        holdings=_holdings(settings, dataset, partition, clients, newcomers, world),
        newcomers=newcomers,
        network=network,
        engine=engine,
    )


def _holdings(
    settings: Settings,
    dataset: Dataset,
    partition: Partition,
    clients: Clients,
    newcomers: Clients | None,
    world: World,
) -> RankData[Holding]:
    """Return which samples this rank loads."""
    here = clients.on(world.role_rank)
    # Every rank judges the global model on its share of the test set, every n-th
    # sample.
    # Strided, since test sets may be sorted by class: shares are alike.
    own_share = np.arange(world.role_rank, dataset.size("test"), world.role_size)
    validation = new_train = new_test = None
    if validates(settings):
        # In full on every rank: the server judges uploads where they are.
        validation = _of_one_client("train", partition.validation)
    if newcomers is not None:
        # New clients are numbered from 0 in their federation, but last in the
        # partition.
        ids = settings.config.clients + newcomers.on(world.role_rank)
        new_train = holding_of("train", partition, ids)
        new_test = holding_of("test", partition, ids)
    return RankData(
        train=holding_of("train", partition, here),
        test=holding_of("test", partition, here),
        global_test=_of_one_client("test", own_share),
        validation=validation,
        new_train=new_train,
        new_test=new_test,
    )


def check_same_network(config: RunConfig, network: nn.Module, world: World) -> None:
    """Refuse a user's network that differs between ranks, for example because its
    constructor draws sizes or weights without torch, or because hosts have different
    files.
    """
    if world.num_workers == 1:
        return
    first, *others = world.role_allgather(outline(network))
    for rank, other in enumerate(others, 1):
        if other.keys() == first.keys():
            different = [name for name in first if not _alike(first[name], other[name])]
        else:
            different = sorted(other.keys() ^ first.keys())
        if different:
            raise UserError(
                f"model {config.network()} is not the same on all ranks: {different[0]} "
                f"differs on rank {rank}; draw by torch alone, which is seeded, and give "
                "every host the same files"
            )


_Outline = tuple[str, float, float]
"""Shape and type of a tensor, the sum of its magnitudes, and its sum."""


def outline(network: nn.Module) -> dict[str, _Outline]:
    found = {}
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        values = torch.nan_to_num(tensor.detach().to(torch.float64))
        kind = f"{tuple(tensor.shape)} {tensor.dtype}"
        found[name] = (kind, float(values.abs().sum()), float(values.sum()))
    return found


def _alike(one: _Outline, other: _Outline) -> bool:
    """Compare two tensors up to rounding: hosts may have different processors."""
    size = 1e-6 * max(one[1], other[1])
    pairs = zip(one[1:], other[1:], strict=True)
    return one[0] == other[0] and all(abs(a - b) <= size for a, b in pairs)


def _placed(
    config: RunConfig, partition: Partition, which: slice, world: World, mode: str
) -> Clients:
    """Place clients on ranks by their steps, since nothing has been measured yet."""
    train_samples = _lengths(partition.train[which])
    test_samples = _lengths(partition.test[which])
    # Steps, not samples: short batches are padded and take as long as full ones.
    loads = client_loads(
        train_samples, epochs=config.epochs, batch_size=config.batch_size
    )
    rank = place(loads, world.num_workers, longest=LONGEST[mode])
    return Clients(rank, train_samples, test_samples)


def _lengths(lists: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([len(samples) for samples in lists])


def holding_of(split: Split, partition: Partition, ids: np.ndarray) -> Holding:
    """Return the samples of a split that these clients have."""
    lists = partition.train if split == "train" else partition.test
    return Holding(split, [lists[i] for i in ids], ids)


def _of_one_client(split: Split, samples: np.ndarray) -> Holding:
    return Holding(split, [samples], np.zeros(1, np.int64))


def load_shard(
    dataset: Dataset, held: Holding, *, device: torch.device, dtype: torch.dtype
) -> Shard:
    """Bring the samples of a holding to the device."""
    return shard(
        dataset, held.split, held.lists, clients=held.ids, device=device, dtype=dtype
    )


def load_stacked_shards(
    materials: Sequence[Material],
    names: Sequence[str],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> list[RankData[Shard]]:
    """Bring the samples of all runs to the device.

    The shards of one kind are views of a single shard with the clients of all runs, so
    that the engine can advance them together.
    """
    shards: list[dict[str, Shard]] = [{} for _ in materials]
    for kind in fields(RankData):
        same_kind = [getattr(material.holdings, kind.name) for material in materials]
        # The runs share method and newcomers: either all have this kind, or none has.
        if same_kind[0] is None:
            continue
        whole = _joined(materials, names, same_kind, device=device, dtype=dtype)
        first = 0
        for held, of_run in zip(same_kind, shards, strict=True):
            # `mergeable` of the engine asks for shards of one whole: see
            # clients/merging.py.
            of_run[kind.name] = sub_shard(whole, first, held.ids)
            first += len(held.ids)
    return [RankData(**of_run) for of_run in shards]


def _joined(
    materials: Sequence[Material],
    names: Sequence[str],
    holdings: Sequence[Holding],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> Shard:
    """Load the same holding of all runs as one shard."""
    runs = list(zip(materials, names, holdings, strict=True))
    shards = []
    # Consecutive runs with the same data set share one copy of each sample on the
    # device. Synthetic data may differ.
    for _, group in groupby(runs, key=lambda run: id(run[0].dataset)):
        alike = list(group)
        lists: list[np.ndarray] = []
        clients: list[str] = []
        for _, name, held in alike:
            lists += held.lists
            # Errors about a client's data name its run, too.
            clients += [f"{client} ({name})" for client in held.ids]
        shards.append(
            shard(
                alike[0][0].dataset,
                holdings[0].split,
                lists,
                clients=np.array(clients, object),
                device=device,
                dtype=dtype,
            )
        )
    return shards[0] if len(shards) == 1 else join(shards)


def check_same_constants(materials: Sequence[Material], names: Sequence[str]) -> None:
    """Refuse runs with different frozen weights, or with constants that their seeds have
    drawn: the engine that they share has one of each.
    """
    first, layout = materials[0].network, materials[0].engine.layout
    for material, name in zip(materials, names, strict=True):
        if tensor := differing_constant(material.network, first, layout):
            raise UserError(
                f"{name} has another frozen {tensor} than {names[0]}, and runs that "
                "advance together share it; start each seed by --seed, or give weights "
                "that are the same for all by --init"
            )
