"""Label flip: attackers train honestly on labels y → classes − 1 − y.

A sample has the same label for all clients (and all stacked seeds) that hold it. So
flipped samples must be separate samples: the training set is there twice, the second
time with flipped labels, and attackers hold samples of the second half.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hpcfed.data.datasets import Dataset, Split


class Flipped(Dataset):
    """A data set with its training samples twice, the second time with flipped labels."""

    def __init__(self, honest: Dataset) -> None:
        self.honest = honest
        self.name = honest.name
        self.task = honest.task
        self.vocabulary = honest.vocabulary
        self.shape = honest.shape
        self.classes = honest.classes
        self.blank = honest.blank
        self.owner_names = honest.owner_names
        self._num_train = honest.size("train")

    def owners(self, split: Split) -> np.ndarray | None:
        owners = self.honest.owners(split)
        if owners is None or split == "test":
            return owners
        return np.concatenate([owners, owners])

    def labels(self, split: Split) -> np.ndarray:
        labels = self.honest.labels(split)
        if split == "test":
            return labels
        return np.concatenate([labels, flipped(labels, self.classes)])

    def inputs(
        self, split: Split, index: np.ndarray, device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        # Both halves of the training set have the same images.
        if split == "train":
            index = index % self._num_train
        return self.honest.inputs(split, index, device=device, dtype=dtype)

    def poison(
        self, lists: Sequence[np.ndarray], attackers: np.ndarray
    ) -> list[np.ndarray]:
        """Return all clients' training samples, with flipped ones for attackers."""
        # Indices into the doubled set: the second half has the flipped labels.
        poisoned = list(lists)
        for attacker in attackers:
            poisoned[attacker] = lists[attacker] + self._num_train
        return poisoned


def flipped(labels: np.ndarray, classes: int) -> np.ndarray:
    return classes - 1 - labels
