"""Which samples every client sees in every step of its local training.

A client with n samples takes ⌈n / batch⌉ steps an epoch, the last of them short,
exactly as if it were trained alone. Where a number of steps is given, it goes over its
samples again and again, anew shuffled, until so many are done. Clients are ordered by
their number of steps, longest first, so that the clients still active at a step are a
prefix. The shape of every step is known on the host beforehand, so the device is never
asked.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcfed.kernels.batch import MOVES
from hpcfed.runtime import randomness


class Length(NamedTuple):
    """How long clients train."""

    epochs: int
    batch_size: int
    steps: int = 0
    """So many in place of epochs, for all clients that have data; 0: by epochs."""


class StepShape(NamedTuple):
    clients: int
    """Still active."""
    slots: int
    """The most samples that an active client has in this step."""
    full: bool
    """Whether every active client has so many."""


def num_steps(sizes: np.ndarray, length: Length) -> np.ndarray:
    return (
        np.where(sizes > 0, length.steps, 0)
        if length.steps
        else length.epochs * -(-sizes // length.batch_size)
    )


def num_epochs(sizes: np.ndarray, length: Length) -> int:
    """The most epochs that one of these clients begins."""
    if not length.steps:
        return length.epochs
    shortest = min((int(size) for size in sizes if size), default=1)
    return -(-length.steps // -(-shortest // length.batch_size))


def num_samples(sizes: np.ndarray, length: Length) -> np.ndarray:
    """Samples that each client sees, counted as often as it sees them."""
    if not length.steps:
        return sizes * length.epochs
    epochs, rest = np.divmod(
        length.steps, np.maximum(-(-sizes // length.batch_size), 1)
    )
    return np.where(
        sizes > 0, epochs * sizes + rest * length.batch_size, 0
    )  # only an epoch's last step is short


def longest_first(lengths: np.ndarray) -> np.ndarray:
    """Positions of all clients that have something to do, those with the most first."""
    order = np.argsort(-lengths, kind="stable")
    return order[lengths[order] > 0]


def step_shapes(sizes: np.ndarray, length: Length) -> list[StepShape]:
    """The shapes of all steps of clients in this order."""
    lengths, per_epoch = (
        num_steps(sizes, length),
        np.maximum(-(-sizes // length.batch_size), 1),
    )
    steps = np.arange(lengths.max(initial=0))[:, None]
    left = np.minimum(sizes - steps % per_epoch * length.batch_size, length.batch_size)
    counts = np.where(steps < lengths, left, 0)
    active, slots = np.count_nonzero(counts, axis=1), counts.max(axis=1, initial=0)
    full = counts.sum(axis=1) == active * slots
    return [
        StepShape(*shape)
        for shape in zip(active.tolist(), slots.tolist(), full.tolist(), strict=True)
    ]


def training_samples(
    index: Tensor,
    sizes: Tensor,
    keys: Tensor,
    length: Length,
    *,
    epochs: int,
    steps: int,
) -> tuple[Tensor, Tensor]:
    """Samples [steps, clients, slots], meaningless beyond a client's own, and their
    numbers [steps, clients].

    `index` [clients, longest] and `sizes` are the clients' own; every epoch has a new
    order, drawn from their keys. `epochs` and `steps` are at least as many as any
    client needs.
    """
    (clients, longest), batch_size, device = (
        index.shape,
        length.batch_size,
        index.device,
    )
    orders, starts, end = [], [], 0
    for block, width in _blocks(longest, length, epochs):
        own = torch.arange(block.start, block.stop, device=device)
        ranks = (
            randomness.bits(randomness.child_keys(keys.unsqueeze(1), own), width) >> 1
            & 0x3FFFFFFFFFFFFFFF
        )
        absent = torch.arange(width, device=device) >= sizes[:, None]
        order = torch.argsort(
            ranks.masked_fill(absent[:, None], 2**62), dim=2
        )  # absent samples sort last
        orders.append(
            index[:, None, :width]
            .expand(-1, len(block), -1)
            .gather(2, order)
            .flatten(1)
        )
        starts.append((own - block.start) * width + end)
        end += len(block) * width
    shuffled, start = torch.cat(orders, 1), torch.cat(starts)

    step = torch.arange(steps, device=device)[:, None]
    per_epoch = ((sizes + batch_size - 1) // batch_size).clamp(min=1)
    first = step % per_epoch * batch_size
    counts = (sizes - first).clamp(max=batch_size) * (
        step < (length.steps or length.epochs * per_epoch)
    )
    begin = start[(step // per_epoch).clamp(max=epochs - 1)] + first
    position = begin[:, :, None] + torch.arange(min(batch_size, longest), device=device)
    row = torch.arange(clients, device=device)[:, None] * end  # of the shuffled samples
    return shuffled.flatten()[position.clamp(max=end - 1) + row], counts


def training_moves(keys: Tensor, batch_size: int, steps: int) -> Tensor:
    """How every sample's image is moved, [steps, clients, batch size]: a number below
    `batch.MOVES`.
    """
    numbers = (
        randomness.bits(keys, steps * batch_size) >> 1 & 0x3FFFFFFFFFFFFFFF
    ) % MOVES
    return numbers.unflatten(1, (steps, batch_size)).transpose(0, 1)


def _blocks(longest: int, length: Length, epochs: int) -> list[tuple[range, int]]:
    """Epochs that are drawn together, and the most samples of a client that begins the
    first of them.

    Where steps are given, only clients with few samples begin a late epoch: a table as
    wide as the longest client for as many epochs as the shortest begins would be mostly
    empty.
    """
    if not length.steps:
        return [(range(epochs), longest)]
    blocks = [(range(1), longest)]
    while (first := blocks[-1][0].stop) < epochs:
        most = (length.steps - 1) // first * length.batch_size
        blocks.append((range(first, min(2 * first, epochs)), min(longest, most)))
    return blocks


def evaluation_samples(
    index: Tensor, sizes: Tensor, *, batch_size: int, steps: int
) -> tuple[Tensor, Tensor]:
    """The same for every sample once, in its own order."""
    step = torch.arange(steps, device=index.device)[:, None] * batch_size
    position = step[:, :, None] + torch.arange(batch_size, device=index.device)
    samples = index.expand(steps, -1, -1).gather(
        2, position.clamp(max=index.shape[1] - 1).expand(-1, len(index), -1)
    )
    return samples, (sizes - step).clamp(0, batch_size)
