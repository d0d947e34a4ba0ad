"""Loads a data set by its name, from its original files."""

import gzip
import hashlib
import importlib.util
import io
import math
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hpcfed.data import DATASETS, Reading, brought, files
from hpcfed.data.datasets import (
    SPLITS,
    ArrayDataset,
    Dataset,
    SyntheticDataset,
    SyntheticSize,
    channel_moments,
)
from hpcfed.errors import UserError

CIFAR_FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
CIFAR_LABELS = {"cifar10": b"labels", "cifar100": b"fine_labels"}
CIFAR_CHECKSUMS = {
    "cifar10": {
        "train": {
            "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        },
        "test": {"test_batch": "40351d587109b95175f43aff81a1287e"},
    },
    "cifar100": {
        "train": {"train": "16019d7e3df5f24257cddd939b257f8d"},
        "test": {"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
    },
}
"""MD5 of CIFAR's files of every split, as published by their authors and torchvision."""
Arrays = dict[str, np.ndarray]
"""`train_inputs`, `train_targets`, the same for testing; images have channels first."""

Share = Callable[[Callable[[], Arrays]], Arrays]
"""Reads arrays by the given function, or gets them from a rank that has read them."""


class NotTheOriginal(ValueError):
    """A file's checksum is not that of the original."""


def load(
    name: str,
    *,
    root: Path | None,
    download: bool,
    seed: int,
    synthetic: SyntheticSize,
    reading: Reading = files.READING,
    share: Share = lambda read: read(),
) -> Dataset:
    """Load a data set of the catalogue, or one of the user's own.

    `share` gets the function that reads a large set of the catalogue, and may return
    what another rank has read.
    """
    # Check again, although the command line did: files may have vanished since.
    files.require(name, root=root, download=download, reading=reading)
    if name == "synthetic":
        return SyntheticDataset(synthetic, seed=seed)
    if name not in DATASETS:
        about = brought.about(name, root=root, reading=reading)
        return ArrayDataset(
            name,
            brought.read(name, root=root, reading=reading),
            classes=about.classes,
            task=about.task,
            vocabulary=about.vocabulary,
        )

    def read() -> Arrays:
        return _with_moments(_arrays(name, root, download=download))

    # The digits are small, so every rank reads them.
    arrays = read() if name == "digits" else share(read)
    return ArrayDataset(name, arrays, classes=DATASETS[name].classes)


def _with_moments(arrays: Arrays) -> Arrays:
    """Return images with the moments by which they are standardised."""
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    whole["mean"], whole["std"] = channel_moments(whole["train_inputs"])
    return whole


def _arrays(name: str, root: Path | None, *, download: bool) -> Arrays:
    if name == "digits":
        return _digits()
    if name in files.IDX_FOLDERS:
        return _idx_arrays(name, root)
    assert root is not None
    if name == "svhn":
        return _svhn(root, download=download)
    return _cifar(name, root, download=download)


def _digits() -> Arrays:
    """Return the digits; every fifth of each class is for testing."""
    table = digits_table()
    images = table[:, :64].reshape(-1, 1, 8, 8)
    labels = table[:, 64]
    test = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        # Published figures of the digits rely on this split: never change it.
        test[np.flatnonzero(labels == label)[4::5]] = True
    return {
        "train_inputs": images[~test],
        "train_targets": labels[~test],
        "test_inputs": images[test],
        "test_targets": labels[test],
    }


def digits_table() -> np.ndarray:
    """Return 64 pixels and a label in every row."""
    # Read scikit-learn's own file, although it is private: importing sklearn.datasets
    # took 1.8 s of a run's start (measured on two busy cores), reading the file 0.01 s.
    # If the file moves, the public function is used.
    found = importlib.util.find_spec("sklearn")
    if found is not None and found.origin:
        path = Path(found.origin).parent / "datasets/data/digits.csv.gz"
        if path.is_file():
            return np.loadtxt(path, delimiter=",", dtype=np.uint8)
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return np.column_stack([bunch.data, bunch.target]).astype(np.uint8)


def _idx_arrays(name: str, root: Path | None) -> Arrays:
    """Read an MNIST-like set.

    torchvision would unpickle a `processed` folder, and it cannot read gzipped files.
    """
    if root is not None and not files.idx_files(name, root=root):
        _download_idx(name, root)
        files.require(name, root=root, download=False)
    paths = files.idx_files(name, root=root)
    assert paths is not None
    arrays = {array: read_idx(path) for array, path in paths.items()}
    for split in SPLITS:
        images = arrays[f"{split}_inputs"]
        labels = arrays[f"{split}_targets"]
        right_shape = images.shape == (len(labels), 28, 28)
        right_labels = labels.max(initial=0) < DATASETS[name].classes
        if not right_shape or not right_labels or not len(labels):
            folder = paths[f"{split}_inputs"].parent
            raise UserError(
                f"{name}: the {split} files in {folder} are not those of {name}; "
                "download them again"
            )
        if name == "emnist":
            # EMNIST images are stored transposed.
            images = images.transpose(0, 2, 1)
        arrays[f"{split}_inputs"] = images[:, None]
    return arrays


def _download_idx(name: str, root: Path) -> None:
    # Takes a second to import, and only downloads need it.
    import torchvision

    folder = files.IDX_FOLDERS[name]
    processed = root / folder / "processed"
    if processed.exists():
        raise UserError(
            f"{name}: {processed} is a pickled form that is never loaded; move it "
            "away, then --download"
        )
    with _file_errors(name, root, download=True):
        # torchvision would also read what it downloads; that is thrown away here.
        kind = {"split": "byclass"} if name == "emnist" else {}
        getattr(torchvision.datasets, folder)(root, download=True, **kind)


def read_idx(path: Path) -> np.ndarray:
    """Return an array of bytes in MNIST's file format, plain or gzipped."""
    opener = gzip.open if path.suffix == ".gz" else open
    with brought.readable(path), opener(path, "rb") as file:
        # Two zeros, 8 for bytes, and the number of dimensions; then their sizes.
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


def _cifar(name: str, root: Path, *, download: bool) -> Arrays:
    if download:
        import torchvision

        kinds = {
            "cifar10": torchvision.datasets.CIFAR10,
            "cifar100": torchvision.datasets.CIFAR100,
        }
        with _file_errors(name, root, download=True):
            kinds[name](root, download=True)
    with _file_errors(name, root, download=False):
        return _read_cifar(name, root)


def _read_cifar(name: str, root: Path) -> Arrays:
    """Return images and labels from the original Python files.

    torchvision reads them, too, but takes two seconds to import. The files are pickles,
    so a file is only unpickled if its checksum is the original's, and even then only
    arrays are.
    """
    arrays = {}
    # Checksums release Python's lock, so a thread per file pays.
    with ThreadPoolExecutor() as threads:
        for split, checksums in CIFAR_CHECKSUMS[name].items():
            paths = [root / CIFAR_FOLDERS[name] / file for file in checksums]
            contents = list(threads.map(_read_original, paths, checksums.values()))
            # The bytes whose checksum was taken, not the file, which might change in
            # between.
            batches = [
                _ArrayUnpickler(io.BytesIO(content)).load() for content in contents
            ]
            images = np.concatenate([batch[b"data"] for batch in batches])
            labels = np.concatenate([batch[CIFAR_LABELS[name]] for batch in batches])
            arrays[f"{split}_inputs"] = images.reshape(-1, 3, 32, 32)
            arrays[f"{split}_targets"] = labels
    return arrays


def _read_original(path: Path, checksum: str) -> bytes:
    content = path.read_bytes()
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != checksum:
        raise NotTheOriginal(str(path))
    return content


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles only arrays, lists and numbers, and calls nothing else."""

    def __init__(self, file: io.BytesIO) -> None:
        # Python 2 wrote them: its strings, including pixels, stay bytes.
        super().__init__(file, encoding="bytes")

    def find_class(self, module: str, name: str) -> Any:
        reconstruct = np.empty(0).__reduce__()[0]
        allowed = {
            "_reconstruct": reconstruct,
            "ndarray": np.ndarray,
            "dtype": np.dtype,
        }
        # Even the originals are not trusted: a pickle could name any function to call.
        if module.partition(".")[0] != "numpy" or name not in allowed:
            raise pickle.UnpicklingError(f"{module}.{name} is not an array")
        return allowed[name]


def _svhn(root: Path, *, download: bool) -> Arrays:
    import torchvision

    arrays: Arrays = {}
    with _file_errors("svhn", root, download=download):
        for split in SPLITS:
            # Already [N, C, H, W], and digit 0 is class 0.
            found = torchvision.datasets.SVHN(root, split=split, download=download)
            arrays[f"{split}_inputs"] = found.data
            arrays[f"{split}_targets"] = found.labels
    return arrays


@contextmanager
def _file_errors(name: str, root: Path, *, download: bool) -> Iterator[None]:
    """Turn what torchvision or a damaged file raises into one helpful line."""
    try:
        yield
    except (RuntimeError, OSError, ValueError, pickle.UnpicklingError) as error:
        reason = " ".join(str(error).split())
        if download:
            line = (
                f"{name}: download into {root} failed ({reason}); try again, or put "
                "the files there yourself"
            )
        elif isinstance(error, RuntimeError | NotTheOriginal):
            line = (
                f"{name}: files in {root} are not the originals (checksums differ); "
                "replace them, or add --download"
            )
        else:
            line = f"{name}: cannot read the files in {root} ({reason}); replace them"
        raise UserError(line) from error
