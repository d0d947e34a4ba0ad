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

from hpcfed.clients.job import Recipe
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

TERMS = 64
"""By how many roundings a gradient of float32 may be off: it is a sum of thousands of
terms, whose roundings add up like a random walk, to 64 for 4,096 of them.
"""
FLIPPED = 0.1
"""By which share an update may be off where a rounding has flipped a ReLU or a pooling
winner.

Which are flipped differs by processor. Of N units about N / 10⁶ are, and each has about
1 / √N of the gradient, so that where flips are likely each of them is small.
"""


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
        inputs=torch.randn(total, *shape, dtype=dtype),
        targets=torch.randint(10, (total,)),
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


def batches(shard: Shard, client: int, sgd: Recipe, key: Tensor) -> Iterator[Tensor]:
    """A client's samples, step by step: epoch after epoch, for so many epochs or so
    many steps, each batch so many times in a row.
    """
    epochs = itertools.count() if sgd.steps else range(sgd.epochs)
    steps = (
        batch
        for epoch in epochs
        for batch in sample_order(shard, client, key, epoch).split(sgd.batch_size)
        for _ in range(sgd.repeat)
    )
    return itertools.islice(steps, sgd.steps or None)


def naive(
    network: nn.Module,
    shard: Shard,
    client: int,
    sgd: Recipe,
    key: Tensor,
    *,
    correction: Tensor | None = None,
    squared: float = 0.0,
    reference: Tensor | None = None,
) -> nn.Module:
    """One client trained alone, as anyone would write it, where its data is.

    Its loss has a further term squared/2 ‖θ − reference‖², and `correction` is added to
    its gradient; both are rows of all parameters, or longer. Parameters that require no
    gradient stay. The optimiser is torch's own.
    """
    network = copy.deepcopy(network).to(shard.inputs).train()
    optimiser = torch_optimiser(network, sgd)
    every_batch = list(batches(shard, client, sgd, key))
    for step, batch in enumerate(every_batch):
        if sgd.schedule is not None:
            factor = sgd.schedule.factor(step, len(every_batch))
            optimiser.param_groups[0]["lr"] = sgd.lr * factor
        optimiser.zero_grad()
        loss = F.cross_entropy(network(shard.inputs[batch]), shard.targets[batch])
        if reference is not None:
            distance = nn.utils.parameters_to_vector(network.parameters())
            distance = distance - reference[: len(distance)]
            loss = loss + squared / 2 * distance.square().sum()
        loss.backward()
        if correction is not None:
            _add_to_gradients(network, correction)
        if sgd.clip:
            nn.utils.clip_grad_norm_(network.parameters(), sgd.clip)
        optimiser.step()
    return network


def torch_optimiser(network: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    parameters = list(network.parameters())
    if recipe.optimiser == "sgd":
        return torch.optim.SGD(
            parameters,
            lr=recipe.lr,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
            nesterov=recipe.nesterov,
        )
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    return kinds[recipe.optimiser](
        parameters,
        lr=recipe.lr,
        betas=(recipe.beta1, recipe.beta2),
        eps=recipe.epsilon,
        weight_decay=recipe.weight_decay,
    )


def _add_to_gradients(network: nn.Module, row: Tensor) -> None:
    start = 0
    for parameter in network.parameters():
        stop = start + parameter.numel()
        if parameter.grad is not None:
            parameter.grad += row[start:stop].view_as(parameter)
        start = stop


def assert_trained_as(
    rows: Tensor, alone: Tensor, first: Tensor, steps: Tensor
) -> None:
    """Check rows of clients against those that each gets alone, in float64.

    A row of float32 is rounded once by each step's decay and once by its update. As flips
    are rare, some client must be free of them: lower precision would show in all.
    """
    moved = (alone - first).norm(dim=1)
    assert (moved > 1e-4 * first.norm()).all(), (
        "training moved nothing: the comparison would be empty"
    )
    off = (rows - alone).norm(dim=1)
    if rows.dtype == torch.float64:
        assert (off < 1e-10 * alone.norm(dim=1)).all()
        return
    rounded = (2 * steps * alone.norm(dim=1) + TERMS * moved) * torch.finfo(
        rows.dtype
    ).eps
    assert (off < FLIPPED * moved).all()
    assert (off < rounded).any(), (off / rounded).tolist()
