"""Where data is found, and whether it is there: cheap checks before anything starts,
without torch.
"""

from dataclasses import replace
from pathlib import Path

from hpcfed.data import DATASETS, DatasetInfo, npz
from hpcfed.errors import UserError, unknown

DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
"""Debian's package dataset-fashion-mnist."""

IDX_FOLDERS = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST", "emnist": "EMNIST"}
"""Folders of MNIST-like sets; also the names of torchvision's classes."""

_TORCHVISION_FILES = {
    "svhn": ["train_32x32.mat", "test_32x32.mat"],
    "cifar10": [
        "cifar-10-batches-py",
        "cifar-10-batches-py/data_batch_1",
        "cifar-10-batches-py/data_batch_2",
        "cifar-10-batches-py/data_batch_3",
        "cifar-10-batches-py/data_batch_4",
        "cifar-10-batches-py/data_batch_5",
        "cifar-10-batches-py/test_batch",
        "cifar-10-batches-py/batches.meta",
    ],
    "cifar100": [
        "cifar-100-python",
        "cifar-100-python/train",
        "cifar-100-python/test",
        "cifar-100-python/meta",
    ],
}
_DEFAULT_MODELS = {(3, 32, 32): "cnn-cifar", (1, 28, 28): "cnn-fmnist"}


def info(
    name: str,
    *,
    root: Path | None,
    synthetic_shape: tuple[int, int, int],
    synthetic_classes: int,
) -> DatasetInfo:
    """Return shape, classes and default model; reads only headers and labels of files."""
    if npz.is_file_name(name):
        path = npz.find(name, root=root)
        shape, classes = npz.shape_and_classes(path)
        return DatasetInfo(
            description=f"your own images in {path}",
            shape=shape,
            classes=classes,
            model=_DEFAULT_MODELS.get(shape, "mlp"),
        )
    _require_known(name)
    if name == "synthetic":
        return replace(
            DATASETS[name],
            shape=synthetic_shape,
            classes=synthetic_classes,
            model=_DEFAULT_MODELS.get(synthetic_shape, "mlp"),
        )
    return DATASETS[name]


def require(name: str, *, root: Path | None, download: bool) -> None:
    """Raise UserError unless the data set is known and its files are there.

    Files may be missing if they may be downloaded.
    """
    if npz.is_file_name(name):
        npz.require(npz.find(name, root=root))
        return
    _require_known(name)
    if name in ("digits", "synthetic"):
        return
    # Also without a root: Debian's package lies outside of it.
    if name in IDX_FOLDERS and idx_files(name, root=root):
        return
    if root is None:
        raise UserError(
            f"{name}: no data folder; name one with --data-root (or HPCFED_DATA)"
        )
    missing = _missing_file(name, root)
    if missing and not download:
        raise UserError(
            f"{name}: no {missing}; put the extracted files there, "
            "name another folder with --data-root (or HPCFED_DATA), or add --download"
        )


def idx_files(name: str, *, root: Path | None) -> dict[str, Path] | None:
    """Return the four files of an MNIST-like set, each plain or gzipped.

    None unless all are in one folder.
    """
    # As torchvision lays them out, so one folder serves both.
    folders = [root / IDX_FOLDERS[name] / "raw"] if root else []
    if name == "fashion-mnist":
        folders.append(DEBIAN_FASHION_MNIST)
    for folder in folders:
        found = [_plain_or_gz(folder / file) for file in _idx_names(name)]
        paths = [path for path in found if path]
        # All four or none: files of two folders may be of two versions.
        if len(paths) == len(npz.ARRAYS):
            return dict(zip(npz.ARRAYS, paths, strict=True))
    return None


def _require_known(name: str) -> None:
    if name not in DATASETS:
        raise unknown("data set", name, (*DATASETS, "file:PATH.npz"))


def _idx_names(name: str) -> list[str]:
    """Return the names of the four files, in the order of `npz.ARRAYS`."""
    train, test = "train", "t10k"
    if name == "emnist":
        train, test = "emnist-byclass-train", "emnist-byclass-test"
    return [
        f"{train}-images-idx3-ubyte",
        f"{train}-labels-idx1-ubyte",
        f"{test}-images-idx3-ubyte",
        f"{test}-labels-idx1-ubyte",
    ]


def _plain_or_gz(path: Path) -> Path | None:
    gz = path.with_name(path.name + ".gz")
    for candidate in (path, gz):
        if candidate.is_file():
            return candidate
    return None


def _missing_file(name: str, root: Path) -> str:
    """Return the first missing file and where, e.g. `cifar-10-batches-py in /data`.

    Empty if all are there.
    """
    if name in IDX_FOLDERS:
        folder = root / IDX_FOLDERS[name] / "raw"
        for file in _idx_names(name):
            if not _plain_or_gz(folder / file):
                return f"{file} (or .gz) in {folder}"
        return ""
    for file in _TORCHVISION_FILES[name]:
        if not (root / file).exists():
            return f"{file} in {root}"
    return ""
