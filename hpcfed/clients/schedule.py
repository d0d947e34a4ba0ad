"""Which samples every client sees in every step of its local training.

A client with n samples takes ⌈n / batch⌉ steps an epoch, the last of them short,
exactly as if it were trained alone. If a number of steps is given, it goes over its
samples repeatedly, reshuffled each time, until it has taken them. Clients are ordered
by their number of steps, longest first, so that the clients still active at a step are
a prefix. The host knows the shape of every step beforehand, so it never waits for the
device.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcfed.kernels.batch import SHIFTS
from hpcfed.runtime import randomness

_LAST = 2**62
"""Larger than all random ranks, so that it sorts last."""
KEPT = 8
"""Plans that are kept, because rounds repeat them: those of a cohort's training and of
a few evaluations.
"""


class Length(NamedTuple):
    """How long clients train."""

    epochs: int
    batch_size: int
    steps: int = 0
    """Steps of every client that has data, instead of epochs; 0: by epochs."""
    repeat: int = 1
    """Consecutive steps on the same minibatch."""

    def steps_per_epoch(self, sizes: np.ndarray) -> np.ndarray:
        """Return ⌈size / batch⌉ of each client."""
        # -(-a // b) is a / b rounded up, exactly, here and elsewhere.
        return -(-sizes // self.batch_size)


class StepShape(NamedTuple):
    """What a step works on."""

    clients: int
    """Number of clients that are still active."""
    slots: int
    """The most samples that an active client has in this step."""
    full: bool
    """Whether every active client has this many samples."""
    length: int = 0
    """Positions of its texts; 0: all of them."""


def num_steps(sizes: np.ndarray, length: Length) -> np.ndarray:
    """Return the steps of each client; none for a client without data."""
    if length.steps:
        return np.where(sizes > 0, length.steps, 0)
    return length.epochs * length.steps_per_epoch(sizes) * length.repeat


def num_epochs(sizes: np.ndarray, length: Length) -> int:
    """Return the most epochs that one of these clients begins."""
    if not length.steps:
        return length.epochs
    with_data = sizes[sizes > 0]
    if not len(with_data):
        return length.steps
    # The smallest client goes over its samples most often.
    fewest_steps = int(length.steps_per_epoch(with_data.min()))
    return -(-length.steps // (fewest_steps * length.repeat))


def num_samples(
    sizes: np.ndarray, length: Length, limits: np.ndarray | None = None
) -> np.ndarray:
    """Return how many samples each client sees, in at most `limits` steps."""
    steps = num_steps(sizes, length)
    if limits is not None:
        steps = np.minimum(steps, limits)
    per_epoch = np.maximum(length.steps_per_epoch(sizes), 1)
    batches, steps_on_last = np.divmod(steps, length.repeat)
    epochs, rest = np.divmod(batches, per_epoch)
    # Only the last batch of an epoch is short, so all batches of an unfinished epoch
    # are full.
    whole_batches = epochs * sizes + rest * length.batch_size
    last_batch = np.minimum(sizes - rest * length.batch_size, length.batch_size)
    seen: np.ndarray = whole_batches * length.repeat + last_batch * steps_on_last
    return seen


def longest_first(lengths: np.ndarray) -> np.ndarray:
    """Return positions of clients with something to do, the busiest first."""
    # Stable: clients with the same amount keep their order, so stacks do, too.
    order = np.argsort(-lengths, kind="stable")
    return order[lengths[order] > 0]


class Work(NamedTuple):
    """What clients do in a local training."""

    steps: np.ndarray
    """Steps of each client."""
    total: int
    """Steps of all clients."""
    longest: int
    """Steps of the client that takes the most."""
    samples: int
    """Samples of all these steps."""
    order: np.ndarray
    """Positions of clients with something to do, the busiest first."""
    in_order: bool
    """Whether `order` lists all clients as they come."""


def work_of(
    sizes: np.ndarray, length: Length, limits: np.ndarray | None = None
) -> Work:
    """Return what clients of these sizes do, up to `limits`; do not change it."""
    return _work(*_as_bytes(sizes, limits), length)


def step_shapes(
    sizes: np.ndarray, length: Length, limits: np.ndarray | None = None
) -> Sequence[StepShape]:
    """Return the shapes of all steps of clients in this order, up to `limits`."""
    return _step_shapes(*_as_bytes(sizes, limits), length)


# Bytes can be looked up, arrays cannot.
def _as_bytes(
    sizes: np.ndarray, limits: np.ndarray | None
) -> tuple[bytes, bytes | None]:
    kept = None if limits is None else limits.astype(np.int64).tobytes()
    return sizes.astype(np.int64).tobytes(), kept


def _as_arrays(
    sizes: bytes, limits: bytes | None
) -> tuple[np.ndarray, np.ndarray | None]:
    kept = None if limits is None else np.frombuffer(limits, np.int64)
    return np.frombuffer(sizes, np.int64), kept


@lru_cache(KEPT)
def _work(sizes_kept: bytes, limits_kept: bytes | None, length: Length) -> Work:
    sizes, limits = _as_arrays(sizes_kept, limits_kept)
    steps = num_steps(sizes, length)
    if limits is not None:
        steps = np.minimum(steps, limits)
    samples = int(num_samples(sizes, length, limits).sum())
    order = longest_first(steps)
    in_order = np.array_equal(order, np.arange(len(sizes)))
    longest = int(steps.max(initial=0))
    return Work(steps, int(steps.sum()), longest, samples, order, in_order)


@lru_cache(KEPT)
def _step_shapes(
    sizes_kept: bytes, limits_kept: bytes | None, length: Length
) -> tuple[StepShape, ...]:
    sizes, limits = _as_arrays(sizes_kept, limits_kept)
    steps_of = num_steps(sizes, length)
    if limits is not None:
        steps_of = np.minimum(steps_of, limits)
    # At least 1, so that clients without data do not divide by 0.
    per_epoch = np.maximum(length.steps_per_epoch(sizes), 1)
    steps = np.arange(steps_of.max(initial=0))[:, None]
    first_sample = steps // length.repeat % per_epoch * length.batch_size
    left = np.minimum(sizes - first_sample, length.batch_size)
    # [steps, clients]: the samples of each client in each step, 0 once it has finished.
    counts = np.where(steps < steps_of, left, 0)
    active = np.count_nonzero(counts, axis=1)
    slots = counts.max(axis=1, initial=0)
    full = counts.sum(axis=1) == active * slots
    columns = active.tolist(), slots.tolist(), full.tolist()
    return tuple(StepShape(*shape) for shape in zip(*columns, strict=True))


def in_a_row(
    shapes: Iterable[StepShape], at_once: int
) -> Iterator[tuple[StepShape, int]]:
    """Yield steps in their order: `at_once` of equal shape together, others singly."""
    for shape, equal in groupby(shapes):
        left = len(list(equal))
        while left:
            steps = at_once if left >= at_once else 1
            yield shape, steps
            left -= steps


def rounded_up(number: int, sizes: int) -> int:
    """Round up to one of `sizes` sizes between two powers of two."""
    # The largest power of two below `number`, or 0 for 1.
    power_of_two = 2 ** (number - 1).bit_length() // 2
    unit = max(1, power_of_two // sizes)
    return -(-number // unit) * unit


def rounded_shape(shape: StepShape, most_clients: int, most_slots: int) -> StepShape:
    """Return a step's shape, rounded up, so that a few captured steps serve all."""
    # Our own kernels need at least two clients.
    clients = min(most_clients, rounded_up(max(shape.clients, 2), 8))
    wide = min(most_slots, rounded_up(shape.slots, 1))
    is_exact = (clients, wide) == (shape.clients, shape.slots)
    return StepShape(clients, wide, shape.full and is_exact, shape.length)


def training_samples(
    index: Tensor,
    sizes: Tensor,
    keys: Tensor,
    length: Length,
    *,
    epochs: int,
    steps: int,
) -> tuple[Tensor, Tensor]:
    """Return samples [steps, clients, slots] and their counts [steps, clients].

    Entries beyond a client's count in a step are meaningless. `index` [clients,
    longest] and `sizes` belong to the clients; every epoch has a new order, drawn from
    their keys. `epochs` and `steps` are at least as many as any client needs.
    """
    places, counts = training_places(
        sizes, index.shape[1], length, epochs=epochs, steps=steps
    )
    order = training_order(index, sizes, keys, length, epochs=epochs)
    return order[places], counts


def training_order(
    index: Tensor, sizes: Tensor, keys: Tensor, length: Length, *, epochs: int
) -> Tensor:
    """Return the samples of all clients in the order of all their epochs, as a vector:
    client by client, epoch by epoch, each as wide as its block.
    """
    orders = []
    for block, width in _epoch_blocks(index.shape[1], length, epochs):
        shuffled = _shuffled(index[:, :width], sizes, keys, block)
        orders.append(shuffled.flatten(1))
    # One vector: 2-D indices would have to be expanded over steps and slots.
    return (orders[0] if len(orders) == 1 else torch.cat(orders, 1)).flatten()


def training_places(
    sizes: Tensor, longest: int, length: Length, *, epochs: int, steps: int
) -> tuple[Tensor, Tensor]:
    """Return where `training_order` has the samples of each step [steps, clients,
    slots], and their counts [steps, clients]. Both depend on the clients' sizes only.
    """
    device = sizes.device
    batch_size = length.batch_size
    starts = []
    row_length = 0
    for block, width in _epoch_blocks(longest, length, epochs):
        # Where each epoch of the block starts among a client's samples.
        epoch_in_block = torch.arange(len(block), device=device)
        starts.append(epoch_in_block * width + row_length)
        row_length += len(block) * width
    epoch_start = torch.cat(starts)

    step = torch.arange(steps, device=device)[:, None]
    per_epoch = ((sizes + batch_size - 1) // batch_size).clamp(min=1)
    batch = step // length.repeat
    first = batch % per_epoch * batch_size
    is_active = step < (length.steps or length.epochs * per_epoch * length.repeat)
    counts = (sizes - first).clamp(max=batch_size) * is_active
    # Clamped: finished clients still get positions, which do not count.
    epoch = (batch // per_epoch).clamp(max=epochs - 1)
    begin = epoch_start[epoch] + first
    slot = torch.arange(min(batch_size, longest), device=device)
    position = begin[:, :, None] + slot
    position = position.clamp(max=row_length - 1)
    row_start = torch.arange(len(sizes), device=device)[:, None] * row_length
    return position + row_start, counts


def _shuffled(index: Tensor, sizes: Tensor, keys: Tensor, epochs: range) -> Tensor:
    """Return the clients' samples [clients, epochs, width], in another order each
    epoch.

    Samples are sorted by random ranks; entries beyond a client's size come last.
    """
    width = index.shape[1]
    numbers = torch.arange(epochs.start, epochs.stop, device=index.device)
    epoch_keys = randomness.child_keys(keys.unsqueeze(1), numbers)
    # 62 random bits: torch has no unsigned integers, and _LAST must stay above.
    ranks = randomness.bits(epoch_keys, width) >> 1 & 0x3FFFFFFFFFFFFFFF
    absent = torch.arange(width, device=index.device) >= sizes[:, None]
    # So a client's order does not depend on the width of the table: whatever the other
    # clients of its stack have, its own samples get the same ranks.
    ranks = ranks.masked_fill(absent[:, None], _LAST)
    order = torch.argsort(ranks, dim=2)
    repeated = index[:, None].expand(-1, len(epochs), -1)
    return repeated.gather(2, order)


def _epoch_blocks(longest: int, length: Length, epochs: int) -> list[tuple[range, int]]:
    """Return blocks of epochs that are drawn together, each with the width of its
    table.

    The width is the most samples of a client that begins the block's first epoch. If a
    number of steps is given, only clients with few samples begin a late epoch. A table
    with the width of the longest client and all epochs of the shortest would be mostly
    empty.
    """
    if not length.steps:
        return [(range(epochs), longest)]
    blocks = [(range(1), longest)]
    last_batch = (length.steps - 1) // length.repeat
    while (first := blocks[-1][0].stop) < epochs:
        # A client begins epoch `first` only if that many epochs fit before its last
        # batch.
        most = last_batch // first * length.batch_size
        width = min(longest, most)
        # Blocks double, so that there are few of them.
        block = range(first, min(2 * first, epochs))
        blocks.append((block, width))
    return blocks


def training_shifts(keys: Tensor, batch_size: int, steps: int) -> Tensor:
    """Return each image's shift, [steps, clients, batch size], below SHIFTS."""
    bits = randomness.bits(keys, steps * batch_size) >> 1 & 0x3FFFFFFFFFFFFFFF
    return (bits % SHIFTS).unflatten(1, (steps, batch_size)).transpose(0, 1)


def evaluation_samples(
    index: Tensor, sizes: Tensor, *, batch_size: int, steps: int
) -> tuple[Tensor, Tensor]:
    """Return samples [steps, clients, slots], each once, and their counts."""
    step = torch.arange(steps, device=index.device)
    slot = torch.arange(batch_size, device=index.device)
    first = step[:, None] * batch_size
    position = first[:, :, None] + slot
    position = position.clamp(max=index.shape[1] - 1)
    position = position.expand(-1, len(index), -1)
    samples = index.expand(steps, -1, -1).gather(2, position)
    return samples, (sizes - first).clamp(0, batch_size)
