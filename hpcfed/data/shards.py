"""The samples of a rank's clients, gathered on its device."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hpcfed.data import Task
from hpcfed.data.array_checks import NO_TARGET
from hpcfed.data.datasets import Dataset, Split
from hpcfed.runtime.accelerator import is_gpu


@dataclass(frozen=True)
class Shard:
    """One split of some clients' data; a shared sample is stored once."""

    inputs: Tensor
    """[samples, *shape], standardised; tokens are int64."""
    targets: Tensor
    """Labels, [samples] int64; next tokens, [samples, length] int64, -100 without a
    next token; or numbers to predict, [samples, outputs].
    """
    index: Tensor
    """[clients, longest], int64: positions in `inputs`, padded with zeros beyond a
    client's size; longest is at least 1.
    """
    sizes: tuple[int, ...]
    """Samples of each client, on the host."""
    clients: np.ndarray
    """Id of each client."""
    blank: Tensor | None = field(default=None, kw_only=True)
    """[channels]: standardised black, which augmentation shifts in from the edges."""
    task: Task = field(default="classification", kw_only=True)
    """What kind of targets these are."""

    @cached_property
    def samples(self) -> np.ndarray:
        """`sizes` as an array. Cached: converting a million of them takes 40 ms, which
        would be most of a small cohort's round.
        """
        return np.array(self.sizes, np.int64)

    @cached_property
    def needs(self) -> np.ndarray:
        """[samples]: a text's positions up to its last target, at least one."""
        has_target = self.targets != NO_TARGET
        # The first target from the end; `argmax` of a row of zeros is 0.
        after_last = has_target.flip(1).byte().argmax(1)
        needs = (has_target.shape[1] - after_last).where(has_target.any(1), 1)
        found: np.ndarray = needs.cpu().numpy()
        return found


@dataclass(frozen=True)
class SubShard(Shard):
    """Consecutive clients of a larger shard, over the same samples."""

    whole: Shard
    first: int
    """Position of the first client in the larger shard."""


def sub_shard(whole: Shard, first: int, clients: np.ndarray) -> SubShard:
    """Return the clients of a shard with these ids, from position `first` on."""
    positions = slice(first, first + len(clients))
    return SubShard(
        whole.inputs,
        whole.targets,
        whole.index[positions],
        whole.sizes[positions],
        clients,
        whole=whole,
        first=first,
        blank=whole.blank,
        task=whole.task,
    )


def join(shards: Iterable[Shard]) -> Shard:
    """Join the clients of several shards, one shard after the other; copies samples."""
    shards = list(shards)
    longest = max(s.index.shape[1] for s in shards)
    indices = []
    sizes: list[int] = []
    num_samples = 0
    for s in shards:
        sizes += s.sizes
        size_column = torch.tensor(s.sizes, dtype=torch.int64)[:, None]
        owned = torch.arange(longest) < size_column
        missing = longest - s.index.shape[1]
        padded = torch.nn.functional.pad(s.index, (0, missing))
        # Shift positions by the earlier shards' samples; padding stays zero.
        indices.append(padded + num_samples * owned.to(padded))
        num_samples += len(s.inputs)
    return Shard(
        inputs=torch.cat([s.inputs for s in shards]),
        targets=torch.cat([s.targets for s in shards]),
        index=torch.cat(indices),
        sizes=tuple(sizes),
        clients=np.concatenate([s.clients for s in shards]),
        blank=shards[0].blank,
        task=shards[0].task,
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

    `lists` has each client's sample numbers in the split; ids count from 0 by default.
    """
    sizes = np.array([len(samples) for samples in lists], dtype=np.int64)
    # Begin with an empty list, so that a rank without samples can concatenate.
    nothing = np.empty(0, dtype=np.int64)
    all_samples = np.concatenate([nothing, *lists])
    # A sample that several clients hold is stored once, and found by position.
    samples, positions = np.unique(all_samples, return_inverse=True)
    longest = int(sizes.max(initial=1))
    index = np.zeros((len(sizes), longest), dtype=np.int64)
    owned = np.arange(longest) < sizes[:, None]
    # A boolean index goes row by row, in the order in which the lists were joined.
    index[owned] = positions
    inputs = dataset.inputs(split, samples, device=device, dtype=dtype)
    if is_gpu(device) and inputs.ndim == 4:
        # Our kernels need the channels of a pixel next to each other.
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    blank = None
    if dataset.blank is not None:
        blank = torch.from_numpy(dataset.blank).to(device, dtype)
    return Shard(
        inputs=inputs,
        targets=dataset.targets(split, samples, device=device, dtype=dtype),
        index=torch.from_numpy(index).to(device),
        sizes=tuple(sizes.tolist()),
        clients=np.arange(len(sizes)) if clients is None else clients,
        blank=blank,
        task=dataset.task,
    )
