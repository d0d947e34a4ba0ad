"""The samples of a rank's clients, gathered on its device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hpcfed.data.datasets import Dataset, Split


@dataclass(frozen=True)
class Shard:
    """One split of some clients' data; each sample is there once, also where clients overlap."""

    images: Tensor
    """[samples, channels, height, width], standardised."""
    labels: Tensor
    """[samples], int64."""
    index: Tensor
    """[clients, longest], int64: positions in `images`; 0 beyond a client's own size, and longest is at least 1."""
    sizes: tuple[int, ...]
    """Samples of each client, on the host."""
    clients: np.ndarray
    """Id of each client."""


def shard(
    dataset: Dataset,
    split: Split,
    lists: Sequence[np.ndarray],
    *,
    device: torch.device,
    dtype: torch.dtype,
    clients: np.ndarray | None = None,
) -> Shard:
    """The samples of clients who hold `lists`, sample numbers in `split`; ids count from 0 unless given."""
    sizes = tuple(len(own) for own in lists)
    samples, positions = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *lists]), return_inverse=True)
    index = np.zeros((len(sizes), max([1, *sizes])), dtype=np.int64)
    index[np.arange(index.shape[1]) < np.array(sizes, dtype=np.int64)[:, None]] = positions
    return Shard(
        images=dataset.images(split, samples, device=device, dtype=dtype),
        labels=torch.from_numpy(dataset.labels(split)[samples]).to(device),
        index=torch.from_numpy(index).to(device),
        sizes=sizes,
        clients=np.arange(len(sizes)) if clients is None else clients,
    )
