"""The samples of a rank's clients, gathered on its device."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hpcfed.data.datasets import Dataset, Split


@dataclass(frozen=True)
class Shard:
    """One split of some clients' data; each sample is there once, also where clients
    overlap.
    """

    images: Tensor
    """[samples, channels, height, width], standardised."""
    labels: Tensor
    """[samples], int64."""
    index: Tensor
    """[clients, longest], int64: positions in `images`; 0 beyond a client's own size,
    and longest is at least 1.
    """
    sizes: tuple[int, ...]
    """Samples of each client, on the host."""
    clients: np.ndarray
    """Id of each client."""
    blank: Tensor | None = field(default=None, kw_only=True)
    """[channels]: what black has become, which is beyond the edges of images."""


@dataclass(frozen=True)
class Part(Shard):
    """Some clients of a larger shard, one after the other there, over the same images."""

    whole: Shard
    first: int
    """Position of the first of them in the larger shard."""


def part(whole: Shard, first: int, clients: np.ndarray) -> Part:
    """As many clients of a shard as there are ids, from position `first` on."""
    here = slice(first, first + len(clients))
    own = (whole.index[here], whole.sizes[here], clients)
    return Part(
        whole.images, whole.labels, *own, whole=whole, first=first, blank=whole.blank
    )


def join(shards: Iterable[Shard]) -> Shard:
    """The clients of several shards, one shard after the other; their images are
    copied.
    """
    shards = list(shards)
    longest = max(s.index.shape[1] for s in shards)
    index, start = [], 0
    for s in shards:
        owned = (
            torch.arange(longest) < torch.tensor(s.sizes, dtype=torch.int64)[:, None]
        )
        padded = torch.nn.functional.pad(s.index, (0, longest - s.index.shape[1]))
        index.append(padded + start * owned.to(padded))
        start += len(s.images)
    return Shard(
        images=torch.cat([s.images for s in shards]),
        labels=torch.cat([s.labels for s in shards]),
        index=torch.cat(index),
        sizes=tuple(size for s in shards for size in s.sizes),
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
    """The samples of clients who hold `lists`, sample numbers in `split`; ids count
    from 0 unless given.
    """
    sizes = tuple(len(own) for own in lists)
    samples, positions = np.unique(
        np.concatenate([np.empty(0, dtype=np.int64), *lists]), return_inverse=True
    )
    index = np.zeros((len(sizes), max([1, *sizes])), dtype=np.int64)
    index[np.arange(index.shape[1]) < np.array(sizes, dtype=np.int64)[:, None]] = (
        positions
    )
    images = dataset.images(split, samples, device=device, dtype=dtype)
    if device.type == "cuda":  # as the kernels of a GPU want them
        images = images.contiguous(memory_format=torch.channels_last)
    return Shard(
        images=images,
        labels=torch.from_numpy(dataset.labels(split)[samples]).to(device),
        index=torch.from_numpy(index).to(device),
        sizes=sizes,
        clients=np.arange(len(sizes)) if clients is None else clients,
        blank=torch.from_numpy(dataset.blank).to(device, dtype),
    )
