"""The samples of a rank's clients, gathered on its device."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hpcfed.data.datasets import Dataset, Split


@dataclass(frozen=True)
class Shard:
    """One split of some clients' data; a sample that several clients hold is there once."""

    images: Tensor
    """[samples, channels, height, width], standardised."""
    labels: Tensor
    """[samples], int64."""
    index: Tensor
    """[clients, longest], int64: positions in `images`. Beyond a client's size there are
    zeros; longest is at least 1.
    """
    sizes: tuple[int, ...]
    """Samples of each client, on the host."""
    clients: np.ndarray
    """Id of each client."""
    blank: Tensor | None = field(default=None, kw_only=True)
    """[channels]: standardised black, which augmentation shifts in from the edges."""


@dataclass(frozen=True)
class SubShard(Shard):
    """Consecutive clients of a larger shard, over the same images."""

    whole: Shard
    first: int
    """Position of the first client in the larger shard."""


def sub_shard(whole: Shard, first: int, clients: np.ndarray) -> SubShard:
    """Return as many clients of a shard as there are ids, from position `first` on."""
    positions = slice(first, first + len(clients))
    return SubShard(
        whole.images,
        whole.labels,
        whole.index[positions],
        whole.sizes[positions],
        clients,
        whole=whole,
        first=first,
        blank=whole.blank,
    )


def join(shards: Iterable[Shard]) -> Shard:
    """Join the clients of several shards, one shard after the other; copies images."""
    shards = list(shards)
    longest = max(s.index.shape[1] for s in shards)
    indices = []
    sizes: list[int] = []
    num_images = 0
    for s in shards:
        sizes += s.sizes
        size_column = torch.tensor(s.sizes, dtype=torch.int64)[:, None]
        owned = torch.arange(longest) < size_column
        missing = longest - s.index.shape[1]
        padded = torch.nn.functional.pad(s.index, (0, missing))
        # Positions move behind the earlier shards' images; padding stays zero.
        indices.append(padded + num_images * owned.to(padded))
        num_images += len(s.images)
    return Shard(
        images=torch.cat([s.images for s in shards]),
        labels=torch.cat([s.labels for s in shards]),
        index=torch.cat(indices),
        sizes=tuple(sizes),
        clients=np.concatenate([s.clients for s in shards]),
        blank=shards[0].blank,
    )


def shard(
    dataset: Dataset,
    split: Split,
    lists: Sequence[np.ndarray],
    *,
    device: torch.device,
    dtype: torch.dtype,
    clients: np.ndarray | None = None,
) -> Shard:
    """Gather the samples of clients on a device.

    `lists` are each client's sample numbers in the split; ids count from 0 unless given.
    """
    sizes = np.array([len(samples) for samples in lists], dtype=np.int64)
    # An empty list first, so that a rank without samples concatenates something.
    nothing = np.empty(0, dtype=np.int64)
    all_samples = np.concatenate([nothing, *lists])
    # A sample that several clients hold is stored once, and found by position.
    samples, positions = np.unique(all_samples, return_inverse=True)
    longest = int(sizes.max(initial=1))
    index = np.zeros((len(sizes), longest), dtype=np.int64)
    owned = np.arange(longest) < sizes[:, None]
    index[owned] = positions
    images = dataset.images(split, samples, device=device, dtype=dtype)
    if device.type == "cuda":
        # Our kernels gather pixels with their channels side by side.
        images = images.contiguous(memory_format=torch.channels_last)
    return Shard(
        images=images,
        labels=torch.from_numpy(dataset.labels(split)[samples]).to(device),
        index=torch.from_numpy(index).to(device),
        sizes=tuple(sizes.tolist()),
        clients=np.arange(len(sizes)) if clients is None else clients,
        blank=torch.from_numpy(dataset.blank).to(device, dtype),
    )
