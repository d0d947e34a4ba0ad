"""Images and labels: kept once on the host, or made when asked for, and standardised on
the device.
"""

import gzip
import hashlib
import importlib.util
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from hpcfed.data import DATASETS, files
from hpcfed.errors import UserError
from hpcfed.runtime import randomness

SYNTHETIC_BLOCK = (
    2**22
)  # values made at once: the hash takes a few int64 temporaries of that many
SYNTHETIC_DISTANCE = 10.0  # measured: a small CNN has 44 %, 97 %, 99 % after three epochs of 4000 samples of 3×32×32

WHOLE, SAMPLED = 2**26, 2**16
"""Bytes of images of which a fingerprint is taken at most, in pieces of so many."""

Split = Literal["train", "test"]
_SPLITS: tuple[Split, Split] = ("train", "test")


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
        """All labels of a split, int64."""

    def images(
        self,
        split: Split,
        index: np.ndarray,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Tensor:
        """The samples at `index`, standardised: [len(index), channels, height, width]."""


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
                f"synthetic: shape, classes and numbers of samples must be at least 1, not {self}"
            )


def load(
    name: str, *, root: Path | None, download: bool, seed: int, synthetic: SyntheticSize
) -> Dataset:
    """A data set of the catalogue, or a user's own `file:PATH.npz`."""
    files.require(name, root=root, download=download)
    if name == "synthetic":
        return SyntheticDataset(synthetic, seed=seed)
    if name == "digits":
        return ArrayDataset(name, _digits(), classes=10)
    if name.startswith("file:"):
        about = files.info(
            name,
            root=root,
            synthetic_shape=synthetic.shape,
            synthetic_classes=synthetic.classes,
        )
        return ArrayDataset(
            name,
            _npz(files.npz_path(name, root=root), about.shape),
            classes=about.classes,
        )
    if name in files.IDX_FOLDERS:
        arrays = _idx_arrays(name, root)
    else:
        assert root is not None
        arrays = (
            _svhn(root, download=download)
            if name == "svhn"
            else _cifar(name, root, download=download)
        )
    return ArrayDataset(name, arrays, classes=DATASETS[name].classes)


class ArrayDataset:
    """Images that are held in host memory as they were stored, usually a byte per
    value.
    """

    def __init__(
        self, name: str, arrays: dict[str, np.ndarray], *, classes: int
    ) -> None:
        """`arrays` as `files.ARRAYS` names them, images as [samples, channels, height,
        width].
        """
        self.name = name
        self.classes = classes
        self._images = {
            split: np.ascontiguousarray(arrays[f"{split}_images"]) for split in _SPLITS
        }
        self._labels = {
            split: arrays[f"{split}_labels"].astype(np.int64) for split in _SPLITS
        }
        channels, height, width = self._images["train"].shape[1:]
        self.shape = (channels, height, width)
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
        precision = torch.promote_types(dtype, torch.float32)
        mean, std = (
            torch.tensor(m, device=device, dtype=precision).view(-1, 1, 1)
            for m in (self._mean, self._std)
        )
        raw = torch.from_numpy(self._images[split][index]).to(device)
        # Mean and std are in units of the raw values, so that a division by 255 would
        # cancel.
        return raw.to(precision).sub_(mean).div_(std).to(dtype)

    @cached_property
    def fingerprint(self) -> str:
        """A checksum over all labels and over images, of which large sets give samples."""
        digest = hashlib.sha256()
        for split in _SPLITS:
            content = self._images[split].reshape(-1).view(np.uint8)
            digest.update(
                f"{self._images[split].shape} {self._images[split].dtype}".encode()
            )
            digest.update(self._labels[split].tobytes())
            step = max(1, -(-len(content) // WHOLE)) * SAMPLED
            for start in range(0, len(content), step):
                digest.update(content[start : start + SAMPLED].tobytes())
        return digest.hexdigest()[:16]


def channel_moments(
    images: np.ndarray, *, block: int = 2048
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each channel; the latter is 1 for a constant
    channel.
    """
    blocks = [images[start : start + block] for start in range(0, len(images), block)]
    share = np.array([[len(part) / len(images)] for part in blocks])
    means = np.array([part.mean(axis=(0, 2, 3), dtype=np.float64) for part in blocks])
    variances = np.array(
        [part.var(axis=(0, 2, 3), dtype=np.float64) for part in blocks]
    )
    mean = (share * means).sum(axis=0)
    std = np.sqrt((share * (variances + (means - mean) ** 2)).sum(axis=0))
    # A constant such as 0.1 leaves a spread of rounding errors, which must not be blown
    # up to unit variance.
    constant = std <= 1e-7 * np.abs(mean)
    return mean, np.where(constant, 1.0, std)


class SyntheticDataset:
    """A prototype of each class under uniform noise; zero mean, unit variance.

    A sample is a hash of (seed, split, its number), so it is the same on every rank and
    device, and only the samples that are asked for are ever made.
    """

    name = "synthetic"

    def __init__(self, size: SyntheticSize, *, seed: int) -> None:
        self.shape = size.shape
        self.classes = size.classes
        self._seed = seed
        self._labels = {
            split: randomness.generator(seed, f"synthetic {split} labels").permutation(
                np.arange(samples) % size.classes
            )
            for split, samples in zip(_SPLITS, (size.train, size.test), strict=True)
        }
        self._signal = signal_amplitude(size.shape)
        self.blank = np.zeros(size.shape[0])

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
        images = torch.empty((len(index), *self.shape), device=device, dtype=dtype)
        prototypes = self._prototypes(device)
        samples = torch.from_numpy(np.asarray(index, dtype=np.int64)).to(device)
        labels = torch.from_numpy(self._labels[split][index]).to(device)
        block = max(1, SYNTHETIC_BLOCK // math.prod(self.shape))
        for part in range(0, len(index), block):
            rows = slice(part, part + block)
            keys = randomness.client_keys(
                self._seed, f"synthetic {split} noise", 0, samples[rows]
            )
            noise = _centred(keys, self.shape).mul_(math.sqrt(1 - self._signal**2))
            images[rows] = noise.add_(prototypes[labels[rows]])
        return images

    def _prototypes(self, device: torch.device) -> Tensor:
        """[classes, *shape]: coarse patterns of 8 × 8 cells, because that is what
        convolutions and pooling can see.
        """
        channels, height, width = self.shape
        keys = randomness.client_keys(
            self._seed,
            "synthetic prototype",
            0,
            torch.arange(self.classes, device=device),
        )
        cells = _centred(keys, (channels, 8, 8)).mul_(self._signal)
        rows, columns = (
            torch.arange(side, device=device) * 8 // side for side in (height, width)
        )
        return cells[:, :, rows][:, :, :, columns]


def signal_amplitude(shape: tuple[int, int, int]) -> float:
    """The prototype's share of a pixel's standard deviation.

    Two prototypes lie √(2·pixels) amplitudes apart: keeping that at SYNTHETIC_DISTANCE
    standard deviations of the noise makes the task about equally hard at any size, and
    hides the class from any single pixel of a large image.
    """
    return min(0.5, SYNTHETIC_DISTANCE / math.sqrt(2 * math.prod(shape)))


def _centred(keys: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Uniform numbers of mean 0 and variance 1; in two steps, for a fused one is not
    rounded alike on every device.
    """
    return (
        randomness.uniform(keys, math.prod(shape))
        .view(len(keys), *shape)
        .sub_(0.5)
        .mul_(math.sqrt(12))
    )


def _digits() -> dict[str, np.ndarray]:
    """Every fifth sample of each class is a test sample, whatever the seed."""
    table = _digits_table()
    images, labels = table[:, :64].reshape(-1, 1, 8, 8), table[:, 64]
    test = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        test[np.flatnonzero(labels == label)[4::5]] = True
    return dict(
        zip(
            files.ARRAYS,
            (images[~test], labels[~test], images[test], labels[test]),
            strict=True,
        )
    )


def _digits_table() -> np.ndarray:
    """64 pixels and a label in every row, from scikit-learn's own file: to import
    scikit-learn takes a second.
    """
    found = importlib.util.find_spec("sklearn")
    path = (
        Path(found.origin).parent / "datasets/data/digits.csv.gz"
        if found and found.origin
        else None
    )
    if path is not None and path.is_file():
        return np.loadtxt(path, delimiter=",", dtype=np.uint8)
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return np.column_stack([bunch.data, bunch.target]).astype(np.uint8)


def _npz(path: Path, shape: tuple[int, int, int]) -> dict[str, np.ndarray]:
    with files.opened(path) as archive:
        arrays = {array: files.read(archive, array) for array in files.ARRAYS}
    return {
        name: _channels_first(a, shape) if "images" in name else a
        for name, a in arrays.items()
    }


def _channels_first(images: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    if images.ndim == 3:
        return images[:, None]
    return images if images.shape[1:] == shape else images.transpose(0, 3, 1, 2)


def _idx_arrays(name: str, root: Path | None) -> dict[str, np.ndarray]:
    """MNIST-like sets, read here: torchvision would unpickle a `processed` folder, and
    it cannot read gzipped files.
    """
    if root is not None and not files.idx_files(name, root=root):
        _download_idx(name, root)
        files.require(name, root=root, download=False)
    paths = files.idx_files(name, root=root)
    assert paths is not None
    arrays = {array: read_idx(path) for array, path in paths.items()}
    for split in _SPLITS:
        images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
        if (
            images.shape != (len(labels), 28, 28)
            or labels.max(initial=0) >= DATASETS[name].classes
            or not len(labels)
        ):
            folder = paths[f"{split}_images"].parent
            raise UserError(
                f"{name}: the {split} files in {folder} are not those of {name}; "
                "download them again"
            )
        # EMNIST is stored transposed.
        arrays[f"{split}_images"] = (
            images.transpose(0, 2, 1) if name == "emnist" else images
        )[:, None]
    return arrays


def _download_idx(name: str, root: Path) -> None:
    import torchvision

    folder = files.IDX_FOLDERS[name]
    processed = root / folder / "processed"
    if processed.exists():
        raise UserError(
            f"{name}: {processed} is a pickled form that is never loaded; move it "
            "away, then --download"
        )
    with _torchvision_errors(name, root, download=True):
        kind = {"split": "byclass"} if name == "emnist" else {}
        getattr(torchvision.datasets, folder)(root, download=True, **kind)


def read_idx(path: Path) -> np.ndarray:
    """An array of bytes in the format of MNIST's files, plain or gzipped."""
    with (
        files.readable(path),
        gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file,
    ):
        magic = file.read(4)
        if len(magic) < 4 or magic[:3] != b"\0\0\x08":
            raise ValueError("it does not begin like an idx file of bytes")
        shape = [int.from_bytes(file.read(4), "big") for _ in range(magic[3])]
        data = np.frombuffer(file.read(), dtype=np.uint8)
        if len(data) != math.prod(shape):
            raise ValueError(
                f"{len(data)} bytes where its header promises {math.prod(shape)}"
            )
    return data.reshape(shape)


def _cifar(name: str, root: Path, *, download: bool) -> dict[str, np.ndarray]:
    import torchvision

    kind = {
        "cifar10": torchvision.datasets.CIFAR10,
        "cifar100": torchvision.datasets.CIFAR100,
    }[name]
    arrays: dict[str, np.ndarray] = {}
    with _torchvision_errors(name, root, download=download):
        for split in _SPLITS:
            part = kind(root, train=split == "train", download=download)
            arrays |= {
                f"{split}_images": part.data.transpose(0, 3, 1, 2),
                f"{split}_labels": np.array(part.targets),
            }
    return arrays


def _svhn(root: Path, *, download: bool) -> dict[str, np.ndarray]:
    import torchvision

    arrays: dict[str, np.ndarray] = {}
    with _torchvision_errors("svhn", root, download=download):
        for split in _SPLITS:
            part = torchvision.datasets.SVHN(root, split=split, download=download)
            arrays |= {f"{split}_images": part.data, f"{split}_labels": part.labels}
    return arrays


@contextmanager
def _torchvision_errors(name: str, root: Path, *, download: bool) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        if download:
            line = f"{name}: download into {root} failed ({reason}); try again, or put the files there yourself"
        elif isinstance(error, RuntimeError):
            line = f"{name}: files in {root} are not the originals (checksums differ); replace them, or add --download"
        else:
            line = f"{name}: cannot read the files in {root} ({reason}); replace them"
        raise UserError(line) from error
