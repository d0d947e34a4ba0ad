"""Which samples every client sees in every step of its local training.

A client with n samples takes ⌈n / batch⌉ steps an epoch, the last of them short, exactly as if it were trained alone.
Clients are ordered by their number of steps, longest first, so that the clients still active at a step are a prefix.
The shape of every step is known on the host beforehand, so the device is never asked.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcfed import streams


class StepShape(NamedTuple):
    clients: int
    """Still active."""
    slots: int
    """The most samples that an active client has in this step."""
    full: bool
    """Whether every active client has so many."""


def num_steps(sizes: np.ndarray, *, epochs: int, batch_size: int) -> np.ndarray:
    return epochs * -(-sizes // batch_size)


def longest_first(lengths: np.ndarray) -> np.ndarray:
    """Positions of all clients that have something to do, those with the most first."""
    order = np.argsort(-lengths, kind="stable")
    return order[lengths[order] > 0]


def step_shapes(sizes: np.ndarray, *, epochs: int, batch_size: int) -> list[StepShape]:
    """The shapes of all steps of clients in this order."""
    per_epoch = -(-sizes // batch_size)
    steps = np.arange(epochs * per_epoch.max(initial=0))[:, None]
    left = np.minimum(sizes - steps % np.maximum(per_epoch, 1) * batch_size, batch_size)
    counts = np.where(steps < epochs * per_epoch, left, 0)
    active, slots = np.count_nonzero(counts, axis=1), counts.max(axis=1, initial=0)
    full = counts.sum(axis=1) == active * slots
    return [StepShape(*shape) for shape in zip(active.tolist(), slots.tolist(), full.tolist(), strict=True)]


def training_samples(
    index: Tensor, sizes: Tensor, keys: Tensor, *, epochs: int, batch_size: int, steps: int
) -> tuple[Tensor, Tensor]:
    """Samples [steps, clients, slots], meaningless beyond a client's own, and their numbers [steps, clients].

    `index` [clients, longest] and `sizes` are the clients' own; every epoch has a new order, drawn from their keys.
    """
    clients, longest = index.shape
    device = index.device
    epoch_keys = streams.child_keys(keys.unsqueeze(1), torch.arange(epochs, device=device))
    ranks = streams.bits(epoch_keys, longest) >> 1 & 0x3FFFFFFFFFFFFFFF
    absent = torch.arange(longest, device=device) >= sizes[:, None]
    shuffled = torch.argsort(ranks.masked_fill(absent[:, None], 2**62), dim=2)  # absent samples sort last
    shuffled = index.unsqueeze(1).expand(-1, epochs, -1).gather(2, shuffled)

    step = torch.arange(steps, device=device)[:, None]
    per_epoch = ((sizes + batch_size - 1) // batch_size).clamp(min=1)
    first = step % per_epoch * batch_size
    counts = (sizes - first).clamp(max=batch_size) * (step < epochs * per_epoch)
    epoch = (step // per_epoch).clamp(max=epochs - 1)
    row = torch.arange(clients, device=device) * epochs + epoch  # of the shuffled samples
    slots = torch.arange(min(batch_size, longest), device=device)
    position = (first[:, :, None] + slots).clamp(max=longest - 1) + row[:, :, None] * longest
    return shuffled.flatten()[position], counts


def evaluation_samples(index: Tensor, sizes: Tensor, *, batch_size: int, steps: int) -> tuple[Tensor, Tensor]:
    """The same for every sample once, in its own order."""
    step = torch.arange(steps, device=index.device)[:, None] * batch_size
    position = step[:, :, None] + torch.arange(batch_size, device=index.device)
    samples = index.expand(steps, -1, -1).gather(2, position.clamp(max=index.shape[1] - 1).expand(-1, len(index), -1))
    return samples, (sizes - step).clamp(0, batch_size)
