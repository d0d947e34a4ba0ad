"""What a data set is, and data sets whose images lie in host memory."""

import hashlib
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

FINGERPRINT_BYTES, FINGERPRINT_PIECE = 2**26, 2**16
"""A fingerprint reads at most so many bytes of images, in pieces of so many: a large set
would take seconds.
"""

Split = Literal["train", "test"]
SPLITS: tuple[Split, Split] = ("train", "test")


class Dataset(Protocol):
    """Labelled images of one shape, in a training and a test set."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""

    @property
    def classes(self) -> int: ...

    @property
    def blank(self) -> np.ndarray:
        """What black is after standardisation, in every channel."""

    def labels(self, split: Split) -> np.ndarray:
        """Return all labels of a split, int64."""

    def images(
        self,
        split: Split,
        index: np.ndarray,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return the samples at `index`, standardised, as [samples, channels, height,
        width].
        """


class ArrayDataset:
    """Images held in host memory as they were stored, usually a byte per value."""

    def __init__(
        self, name: str, arrays: dict[str, np.ndarray], *, classes: int
    ) -> None:
        """`arrays` as `npz.ARRAYS` names them, images as [samples, channels, height,
        width].
        """
        self.name = name
        self.classes = classes
        self._images: dict[Split, np.ndarray] = {}
        self._labels: dict[Split, np.ndarray] = {}
        for split in SPLITS:
            images = arrays[f"{split}_images"]
            labels = arrays[f"{split}_labels"]
            self._images[split] = np.ascontiguousarray(images)
            self._labels[split] = labels.astype(np.int64)
        channels, height, width = self._images["train"].shape[1:]
        self.shape = (channels, height, width)
        # Of the training set alone; test images are standardised by it too.
        self._mean, self._std = channel_moments(self._images["train"])
        self.blank = -self._mean / self._std

    def labels(self, split: Split) -> np.ndarray:
        return self._labels[split]

    def images(
        self,
        split: Split,
        index: np.ndarray,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Tensor:
        # At least float32, also where the run computes in less.
        precision = torch.promote_types(dtype, torch.float32)

        def per_channel(moments: np.ndarray) -> Tensor:
            return torch.tensor(moments, device=device, dtype=precision).view(-1, 1, 1)

        # Bytes travel to the device, and are widened there. Mean and std are in units
        # of the raw values, so a division by 255 would cancel.
        chosen = self._images[split][index]
        raw = torch.from_numpy(chosen).to(device)
        centred = raw.to(precision).sub_(per_channel(self._mean))
        return centred.div_(per_channel(self._std)).to(dtype)

    @cached_property
    def fingerprint(self) -> str:
        """A checksum over all labels and over images; large sets give samples of them."""
        digest = hashlib.sha256()
        for split in SPLITS:
            images = self._images[split]
            digest.update(f"{images.shape} {images.dtype}".encode())
            digest.update(self._labels[split].tobytes())
            # Pieces at equal distances through the whole set.
            content = images.reshape(-1).view(np.uint8)
            every = max(1, -(-len(content) // FINGERPRINT_BYTES))
            for start in range(0, len(content), every * FINGERPRINT_PIECE):
                piece = content[start : start + FINGERPRINT_PIECE]
                digest.update(piece.tobytes())
        return digest.hexdigest()[:16]


def channel_moments(
    images: np.ndarray, *, block: int = 2048
) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of each channel; 1 for a constant channel.

    Goes through blocks of images, because float64 copies of all would not fit.
    """
    shares = []
    means = []
    variances = []
    for start in range(0, len(images), block):
        some = images[start : start + block]
        shares.append([len(some) / len(images)])
        means.append(some.mean(axis=(0, 2, 3), dtype=np.float64))
        variances.append(some.var(axis=(0, 2, 3), dtype=np.float64))
    share = np.array(shares)
    block_means = np.array(means)
    mean = (share * block_means).sum(axis=0)
    # Variance within the blocks plus variance between them.
    spread = np.array(variances) + (block_means - mean) ** 2
    std = np.sqrt((share * spread).sum(axis=0))
    # A constant such as 0.1 leaves a spread of rounding errors, which must not be blown
    # up to unit variance.
    constant = std <= 1e-7 * np.abs(mean)
    return mean, np.where(constant, 1.0, std)
