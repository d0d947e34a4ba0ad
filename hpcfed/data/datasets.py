"""What a data set is: samples in host memory, or synthetic ones, made on the device."""

import hashlib
import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hpcfed.data import Task
from hpcfed.errors import UserError
from hpcfed.runtime import randomness

FINGERPRINT_BYTES, FINGERPRINT_PIECE = 2**26, 2**16
"""The most bytes of inputs that a fingerprint reads, and the bytes of each piece:
reading all of a large set would take seconds.
"""

Split = Literal["train", "test"]
SPLITS: tuple[Split, Split] = ("train", "test")


class Dataset:
    """Samples of one shape, in a training and a test set.

    Unless a subclass says otherwise, they are labelled images without owners.
    """

    name: str
    task: Task = "classification"
    shape: tuple[int, ...]
    """The shape of one sample, as in `DatasetInfo`."""
    classes: int
    """Number of classes, size of the vocabulary, or how many numbers to predict."""
    vocabulary: int = 0
    """Number of different input tokens; 0: inputs are numbers."""
    blank: np.ndarray | None = None
    """Standardised black, in every channel; None if samples are not images."""
    owner_names: np.ndarray | None = None
    """Names of natural clients, by number; None if there are none."""

    def size(self, split: Split) -> int:
        """Return the number of samples in a split."""
        return len(self.labels(split))

    def labels(self, split: Split) -> np.ndarray:
        """Return all labels of a split, int64; for classification only."""
        raise NotImplementedError

    def owners(self, split: Split) -> np.ndarray | None:
        """Return the natural client of every sample, counted from 0, and -1 for samples
        without an owner; None if there are no natural clients.
        """
        return None

    def inputs(
        self, split: Split, index: np.ndarray, device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        """Return the samples at `index` as [samples, *shape]: standardised numbers of
        this type, or tokens, which are int64.
        """
        raise NotImplementedError

    def targets(
        self, split: Split, index: np.ndarray, device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        """Return the targets of the samples at `index`, as in `Shard.targets`."""
        return torch.from_numpy(self.labels(split)[index]).to(device)


class ArrayDataset(Dataset):
    """Samples in host memory as stored, images usually with a byte per value."""

    def __init__(
        self,
        name: str,
        arrays: Mapping[str, np.ndarray],
        *,
        classes: int,
        task: Task = "classification",
        vocabulary: int = 0,
    ) -> None:
        """Hold `train_inputs` [samples, *shape], `train_targets`, and the same for the
        test set; `train_owners` and `owner_names` if samples have owners; `mean` and
        `std` of the training set's channels, if known.
        """
        self.name = name
        self.classes = classes
        self.task = task
        self.vocabulary = vocabulary
        self._inputs: dict[Split, np.ndarray] = {}
        self._targets: dict[Split, np.ndarray] = {}
        self._owners: dict[Split, np.ndarray | None] = {}
        for split in SPLITS:
            inputs = arrays[f"{split}_inputs"]
            targets = arrays[f"{split}_targets"]
            self._inputs[split] = np.ascontiguousarray(inputs)
            # Numbers to predict are kept as they are, and rounded on the device.
            if task != "regression":
                targets = targets.astype(np.int64, copy=False)
            self._targets[split] = targets
            self._owners[split] = arrays.get(f"{split}_owners")
        self.owner_names = arrays.get("owner_names")
        self.shape = self._inputs["train"].shape[1:]
        if vocabulary:
            return
        # Computed only from the training set; test samples are standardised by it, too.
        if "mean" in arrays:
            self._mean, self._std = arrays["mean"], arrays["std"]
        else:
            self._mean, self._std = channel_moments(self._inputs["train"])
        if len(self.shape) == 3:
            self.blank = -self._mean / self._std

    def size(self, split: Split) -> int:
        return len(self._targets[split])

    def labels(self, split: Split) -> np.ndarray:
        assert self.task == "classification"
        return self._targets[split]

    def owners(self, split: Split) -> np.ndarray | None:
        return self._owners[split]

    def inputs(
        self, split: Split, index: np.ndarray, device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        # Bytes are sent to the device, and widened there.
        chosen = self._inputs[split][index]
        raw = torch.from_numpy(chosen).to(device)
        if self.vocabulary:
            return raw.to(torch.int64)
        # At least float32, even if the run computes in less.
        precision = torch.promote_types(dtype, torch.float32)
        ones = [1] * (len(self.shape) - 1)

        def per_channel(moments: np.ndarray) -> Tensor:
            return torch.tensor(moments, device=device, dtype=precision).view(-1, *ones)

        # Mean and std are in units of the raw values, so dividing by 255 would cancel.
        centred = raw.to(precision).sub_(per_channel(self._mean))
        return centred.div_(per_channel(self._std)).to(dtype)

    def targets(
        self, split: Split, index: np.ndarray, device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        chosen = torch.from_numpy(self._targets[split][index]).to(device)
        return chosen.to(dtype) if self.task == "regression" else chosen

    @cached_property
    def fingerprint(self) -> str:
        """A checksum over all targets, and over inputs; large sets are sampled."""
        digest = hashlib.sha256()
        for split in SPLITS:
            inputs = self._inputs[split]
            digest.update(f"{inputs.shape} {inputs.dtype}".encode())
            digest.update(self._targets[split].tobytes())
            owners = self._owners[split]
            if owners is not None:
                digest.update(owners.tobytes())
            # Equally spaced pieces of the whole set.
            content = inputs.reshape(-1).view(np.uint8)
            # 1 if the set is small enough to be read as a whole.
            every = max(1, -(-len(content) // FINGERPRINT_BYTES))
            for start in range(0, len(content), every * FINGERPRINT_PIECE):
                piece = content[start : start + FINGERPRINT_PIECE]
                digest.update(piece.tobytes())
        return digest.hexdigest()[:16]


def channel_moments(
    inputs: np.ndarray, *, block: int = 2048
) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of each channel or feature, which is the
    second axis; a constant one gets a deviation of 1.

    Go through blocks of samples, because float64 copies of all would not fit. Each core
    processes some of the blocks: numpy releases Python's lock.
    """
    others = (0, *range(2, inputs.ndim))

    def moments(start: int) -> tuple[list[float], np.ndarray, np.ndarray]:
        some = inputs[start : start + block]
        mean = some.mean(axis=others, dtype=np.float64)
        variance = some.var(axis=others, dtype=np.float64)
        return [len(some) / len(inputs)], mean, variance

    # As many threads as cores that the launcher has given us, not as the machine has.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        found = list(threads.map(moments, range(0, len(inputs), block)))
    share, block_means, variances = (
        np.array(part) for part in zip(*found, strict=True)
    )
    mean = (share * block_means).sum(axis=0)
    # Variance within the blocks plus variance between them.
    spread = variances + (block_means - mean) ** 2
    std = np.sqrt((share * spread).sum(axis=0))
    # A constant such as 0.1 leaves a tiny spread of rounding errors, which must not be
    # scaled up to unit variance.
    constant = std <= 1e-7 * np.abs(mean)
    return mean, np.where(constant, 1.0, std)


BLOCK = 2**22
"""Values generated at once: the hash needs a few int64 temporaries of this size."""
DISTANCE = 10.0
"""Distance between two prototypes, in standard deviations of the noise. Measured: a
small CNN has 44 %, 97 %, 99 % after three epochs of 4000 samples of 3×32×32.
"""


@dataclass(frozen=True)
class SyntheticSize:
    """How much synthetic data there is."""

    shape: tuple[int, int, int]
    classes: int
    train: int
    test: int

    def __post_init__(self) -> None:
        if min(*self.shape, self.classes, self.train, self.test) < 1:
            raise UserError(
                "synthetic: shape, classes and numbers of samples must be at least 1, "
                f"not {self}"
            )


class SyntheticDataset(Dataset):
    """A prototype per class plus uniform noise; zero mean, unit variance.

    A sample is a hash of (seed, split, its number). So it is the same on every rank and
    device, and only requested samples are ever generated.
    """

    name = "synthetic"

    def __init__(self, size: SyntheticSize, *, seed: int) -> None:
        self.shape = size.shape
        self._size = size
        self.classes = size.classes
        self._seed = seed
        self._labels: dict[Split, np.ndarray] = {
            "train": _labels(size.train, size.classes, seed, "train"),
            "test": _labels(size.test, size.classes, seed, "test"),
        }
        # The larger the image, the fainter the prototype.
        self._signal = signal_amplitude(size.shape)
        self.blank = np.zeros(size.shape[0])

    def labels(self, split: Split) -> np.ndarray:
        return self._labels[split]

    def inputs(
        self, split: Split, index: np.ndarray, device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        shape = (len(index), *self.shape)
        images = torch.empty(shape, device=device, dtype=dtype)
        prototypes = self._prototypes(device)
        numbers = np.asarray(index, dtype=np.int64)
        samples = torch.from_numpy(numbers).to(device)
        labels_of_samples = self._labels[split][index]
        labels = torch.from_numpy(labels_of_samples).to(device)
        # Signal and noise together have unit variance.
        noise_amplitude = math.sqrt(1 - self._signal**2)
        purpose = f"synthetic {split} noise"
        block = max(1, BLOCK // math.prod(self.shape))
        for start in range(0, len(index), block):
            rows = slice(start, start + block)
            # Keyed by sample: every rank makes its own images, and all agree on them.
            keys = randomness.client_keys(self._seed, purpose, 0, samples[rows])
            noise = _centred(keys, self._size.shape).mul_(noise_amplitude)
            # Converted to the dtype of the run only at the end.
            images[rows] = noise.add_(prototypes[labels[rows]])
        return images

    def _prototypes(self, device: torch.device) -> Tensor:
        """Return [classes, *shape]: patterns of 8 × 8 cells.

        They are coarse because convolutions and pooling can see such patterns.
        """
        channels, height, width = self._size.shape
        classes = torch.arange(self.classes, device=device)
        keys = randomness.client_keys(self._seed, "synthetic prototype", 0, classes)
        cells = _centred(keys, (channels, 8, 8)).mul_(self._signal)
        # The cell that each pixel lies in.
        rows = torch.arange(height, device=device) * 8 // height
        columns = torch.arange(width, device=device) * 8 // width
        return cells[:, :, rows][:, :, :, columns]


def _labels(samples: int, classes: int, seed: int, split: Split) -> np.ndarray:
    """Return shuffled labels, with equally many of each class as far as possible."""
    rng = randomness.generator(seed, f"synthetic {split} labels")
    # Equally many samples of each class, up to one.
    return rng.permutation(np.arange(samples) % classes)


def signal_amplitude(shape: tuple[int, int, int]) -> float:
    """Return the prototype's share of a pixel's standard deviation.

    Two prototypes are √(2·pixels) amplitudes apart. Keeping that at DISTANCE standard
    deviations of the noise makes the task about equally hard at any size, and hides the
    class from any single pixel of a large image.
    """
    return min(0.5, DISTANCE / math.sqrt(2 * math.prod(shape)))


def _centred(keys: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Return uniform numbers of mean 0 and variance 1."""
    uniform = randomness.uniform(keys, math.prod(shape))
    uniform = uniform.view(len(keys), *shape)
    # In two steps: a fused operation is not rounded the same on every device.
    return uniform.sub_(0.5).mul_(math.sqrt(12))
