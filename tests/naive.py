"""Local training of one client alone, as anyone would write it: what the batched engine
must equal.
"""

import copy
import itertools
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcfed.clients.job import Sgd
from hpcfed.data.shards import Shard
from hpcfed.runtime import randomness

SHAPES = {
    "mlp": (1, 8, 8),
    "cnn-digits": (1, 8, 8),
    "cnn-bn": (1, 8, 8),
    "cnn-fmnist": (1, 28, 28),
    "cnn-emnist": (1, 28, 28),
}

SMALL = {"resnet18": (3, 16, 16), "cnn-pfl": (3, 12, 12), "cnn-cifar": (3, 20, 20)}


def shape_of(name: str) -> tuple[int, int, int]:
    return (SHAPES | SMALL).get(name, (3, 16, 16))


def make_shard(
    shape: tuple[int, int, int], sizes: tuple[int, ...], dtype: torch.dtype
) -> Shard:
    torch.manual_seed(7)
    total, longest = sum(sizes), max(sizes)
    index = torch.zeros(len(sizes), longest, dtype=torch.int64)
    for client, size in enumerate(sizes):
        index[client, :size] = torch.randperm(total)[:size]  # clients may share samples
    return Shard(
        images=torch.randn(total, *shape, dtype=dtype),
        labels=torch.randint(10, (total,)),
        index=index,
        sizes=sizes,
        clients=np.arange(100, 100 + len(sizes)),
    )


def sample_order(shard: Shard, client: int, key: Tensor, epoch: int) -> Tensor:
    """The documented order, written anew: the client's samples sorted by the random
    numbers of its epoch.
    """
    numbers = randomness.bits(
        randomness.child_keys(randomness.child_keys(key, 0), epoch), shard.sizes[client]
    )
    return shard.index[client, : shard.sizes[client]][
        torch.argsort(numbers >> 1 & 0x3FFFFFFFFFFFFFFF)
    ]


def batches(shard: Shard, client: int, sgd: Sgd, key: Tensor) -> Iterator[Tensor]:
    """A client's samples, step by step: epoch after epoch, for so many epochs or so
    many steps.
    """
    epochs = itertools.count() if sgd.steps else range(sgd.epochs)
    steps = (
        batch
        for epoch in epochs
        for batch in sample_order(shard, client, key, epoch).split(sgd.batch_size)
    )
    return itertools.islice(steps, sgd.steps or None)


def naive(
    network: nn.Module, shard: Shard, client: int, sgd: Sgd, key: Tensor
) -> nn.Module:
    """One client trained alone, as anyone would write it, where its data is."""
    network = copy.deepcopy(network).to(shard.images).train()
    optimiser = torch.optim.SGD(
        network.parameters(),
        lr=sgd.lr,
        momentum=sgd.momentum,
        weight_decay=sgd.weight_decay,
    )
    for batch in batches(shard, client, sgd, key):
        optimiser.zero_grad()
        F.cross_entropy(network(shard.images[batch]), shard.labels[batch]).backward()
        if sgd.clip:
            nn.utils.clip_grad_norm_(network.parameters(), sgd.clip)
        optimiser.step()
    return network
