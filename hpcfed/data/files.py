"""Where data is, and whether it exists: checked before a run starts, without torch."""

from dataclasses import replace
from pathlib import Path

from hpcfed import plugins
from hpcfed.data import DATASETS, DatasetInfo, Reading, brought
from hpcfed.data.brought import is_brought
from hpcfed.errors import UserError, unknown

DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
"""Debian's package dataset-fashion-mnist."""

READING = Reading()
"""How a user's data is read by default."""

IDX_FOLDERS = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST", "emnist": "EMNIST"}
"""Folders of MNIST-like sets; also the names of torchvision's classes."""

IDX_ARRAYS = ("train_inputs", "train_targets", "test_inputs", "test_targets")
"""Contents of the four files of an MNIST-like set."""

TORCHVISION_FILES = {
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
_DEFAULT_MODELS: dict[tuple[int, ...], str] = {
    (3, 32, 32): "cnn-cifar",
    (1, 28, 28): "cnn-fmnist",
}


def info(
    name: str,
    *,
    root: Path | None,
    synthetic_shape: tuple[int, int, int],
    synthetic_classes: int,
    reading: Reading = READING,
) -> DatasetInfo:
    """Return shape, classes and default model; read no images from files."""
    if is_brought(name):
        return _own_info(name, root, reading)
    _require_known(name)
    if name == "synthetic":
        return replace(
            DATASETS[name],
            shape=synthetic_shape,
            classes=synthetic_classes,
            model=_DEFAULT_MODELS.get(synthetic_shape, "mlp"),
        )
    return DATASETS[name]


def _own_info(name: str, root: Path | None, reading: Reading) -> DatasetInfo:
    about = brought.about(name, root=root, reading=reading)
    # No network of the catalogue takes tokens.
    model = "" if about.vocabulary else _DEFAULT_MODELS.get(about.shape, "mlp")
    return DatasetInfo(
        description=f"your own data in {brought.place(name, root=root)}",
        shape=about.shape,
        classes=about.classes,
        model=model,
        task=about.task,
        vocabulary=about.vocabulary,
        owners=about.owners,
        samples=about.samples,
    )


def require(
    name: str, *, root: Path | None, download: bool, reading: Reading = READING
) -> None:
    """Raise UserError unless the data set is known and its files exist.

    Files may be missing if they may be downloaded.
    """
    if is_brought(name):
        brought.require(name, root=root, reading=reading)
        return
    _require_known(name)
    if name in ("digits", "synthetic"):
        return
    # Also without a root: Debian's package is elsewhere.
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
    # The same layout as torchvision's, so one folder serves both.
    folders = [root / IDX_FOLDERS[name] / "raw"] if root else []
    if name == "fashion-mnist":
        folders.append(DEBIAN_FASHION_MNIST)
    for folder in folders:
        found = [_plain_or_gz(folder / file) for file in _idx_names(name)]
        paths = [path for path in found if path]
        # All four or none: two folders may hold different versions.
        if len(paths) == len(IDX_ARRAYS):
            return dict(zip(IDX_ARRAYS, paths, strict=True))
    return None


def _require_known(name: str) -> None:
    if name in DATASETS:
        return
    if plugins.is_file(name):
        raise UserError(
            f"data set {name}: say which function makes it, as in {name}:load"
        )
    if name.endswith(".npz"):
        raise UserError(f"data set {name}: a file is named as in file:{name}")
    installed = plugins.installed("datasets")
    raise unknown("data set", name, (*DATASETS, *installed, *brought.FORMS))


def _idx_names(name: str) -> list[str]:
    """Return the names of the four files, in the order of IDX_ARRAYS."""
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
    """Return the first missing file and its folder, e.g. `cifar-10-batches-py in
    /data`.

    Empty if none is missing.
    """
    if name in IDX_FOLDERS:
        folder = root / IDX_FOLDERS[name] / "raw"
        for file in _idx_names(name):
            if not _plain_or_gz(folder / file):
                return f"{file} (or .gz) in {folder}"
        return ""
    for file in TORCHVISION_FILES[name]:
        if not (root / file).exists():
            return f"{file} in {root}"
    return ""
