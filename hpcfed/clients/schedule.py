"""Which samples every client sees in every step of its local training.

A client with n samples takes ⌈n / batch⌉ steps an epoch, the last of them short, exactly as if it were trained alone.
Clients are ordered by their number of steps, longest first, so that the clients still active at a step are a prefix.
The shape of every step is known on the host beforehand, so the device is never asked.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hpcfed import streams


@dataclass(frozen=True)
class Schedule:
    order: np.ndarray
    """Positions of the clients that have samples, most steps first."""
    samples: Tensor
    """[steps, ordered clients, slots]: positions in the shard's images; meaningless beyond a client's own."""
    counts: np.ndarray
    """[steps, ordered clients]: how many slots of a step hold a sample; 0 when the client has finished."""
    counts_on_device: Tensor
    """The same, beside the samples."""

    def shape(self, step: int) -> tuple[int, int, bool]:
        """Active clients, slots, and whether every slot of the active clients holds a sample."""
        counts = self.counts[step]
        active = int(np.count_nonzero(counts))
        slots = int(counts.max(initial=0))
        return active, slots, bool((counts[:active] == slots).all())


def num_steps(sizes: np.ndarray, *, epochs: int, batch_size: int) -> np.ndarray:
    return epochs * -(-sizes // batch_size)


def training_schedule(index: Tensor, sizes: np.ndarray, keys: Tensor, *, epochs: int, batch_size: int) -> Schedule:
    """Every epoch in a new random order, drawn from the clients' keys."""
    order = _longest_first(num_steps(sizes, epochs=epochs, batch_size=batch_size))
    sizes = sizes[order]
    if not len(order):
        return _empty(index)
    longest, device = int(sizes.max()), index.device
    on_device = torch.from_numpy(order).to(device)
    owned = torch.from_numpy(sizes).to(device)
    epoch_keys = streams.child_keys(keys[on_device].unsqueeze(1), torch.arange(epochs, device=device))
    ranks = streams.bits(epoch_keys, longest) >> 1 & 0x3FFFFFFFFFFFFFFF
    absent = torch.arange(longest, device=device) >= owned[:, None]
    shuffled = torch.argsort(ranks.masked_fill(absent[:, None], 2**62), dim=2)  # absent samples sort last
    shuffled = index[on_device, :longest].unsqueeze(1).expand(-1, epochs, -1).gather(2, shuffled)

    counts = _counts(sizes, epochs=epochs, batch_size=batch_size)
    steps = torch.arange(len(counts), device=device)[:, None]
    per_epoch = (owned + batch_size - 1) // batch_size
    epoch = (steps // per_epoch).clamp(max=epochs - 1)
    first = steps % per_epoch * batch_size
    slots = torch.arange(min(batch_size, longest), device=device)
    row = torch.arange(len(order), device=device) * epochs + epoch  # of the shuffled samples
    position = (first[:, :, None] + slots).clamp(max=longest - 1) + row[:, :, None] * longest
    samples = shuffled.flatten()[position]
    return Schedule(order, samples, counts, torch.from_numpy(counts).to(device))


def evaluation_schedule(index: Tensor, sizes: np.ndarray, *, batch_size: int) -> Schedule:
    """Every sample once, in its own order."""
    order = _longest_first(sizes)
    if not len(order):
        return _empty(index)
    sizes = sizes[order]
    counts = _counts(sizes, epochs=1, batch_size=batch_size)
    padding = len(counts) * batch_size - index.shape[1]
    samples = index[torch.from_numpy(order).to(index.device)]
    samples = torch.nn.functional.pad(samples, (0, padding)) if padding > 0 else samples[:, : padding or None]
    samples = samples.unflatten(1, (-1, batch_size)).transpose(0, 1)
    return Schedule(order, samples, counts, torch.from_numpy(counts).to(index.device))


def _longest_first(lengths: np.ndarray) -> np.ndarray:
    order = np.argsort(-lengths, kind="stable")
    return order[lengths[order] > 0]


def _counts(sizes: np.ndarray, *, epochs: int, batch_size: int) -> np.ndarray:
    per_epoch = -(-sizes // batch_size)
    steps = np.arange(epochs * per_epoch.max())[:, None]
    left = sizes - steps % per_epoch * batch_size
    return np.where(steps < epochs * per_epoch, np.minimum(left, batch_size), 0)


def _empty(index: Tensor) -> Schedule:
    nobody = np.zeros((0, 0), np.int64)
    return Schedule(np.empty(0, np.int64), index[None, :0], nobody, torch.from_numpy(nobody))
