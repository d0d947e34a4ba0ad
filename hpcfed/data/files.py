"""Where data is found, and whether it is there: cheap checks before anything starts,
without torch.
"""

import math
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from hpcfed.data import DATASETS, DatasetInfo
from hpcfed.errors import UserError, unknown
from hpcfed.runtime import memory

MOST_VALUE = 1e15
"""The largest value of an image: squares of it are summed in float32."""
ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")
DEBIAN_FASHION_MNIST = Path(
    "/usr/share/datasets/fashion-mnist"
)  # Debian package dataset-fashion-mnist

IDX_FOLDERS = {
    "mnist": "MNIST",
    "fashion-mnist": "FashionMNIST",
    "emnist": "EMNIST",
}  # also torchvision's classes

_FILE = "file:"
_TORCHVISION_FILES = {
    "svhn": ["train_32x32.mat", "test_32x32.mat"],
    "cifar10": [
        "cifar-10-batches-py",
        *(f"cifar-10-batches-py/data_batch_{number}" for number in range(1, 6)),
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
_MODELS = {(3, 32, 32): "cnn-cifar", (1, 28, 28): "cnn-fmnist"}


def info(
    name: str,
    *,
    root: Path | None,
    synthetic_shape: tuple[int, int, int],
    synthetic_classes: int,
) -> DatasetInfo:
    """Shape, classes and default model; of a `file:` only headers and labels are read."""
    if name.startswith(_FILE):
        path = npz_path(name, root=root)
        shape, classes = _npz_info(path)
        return DatasetInfo(
            description=f"your own images in {path}",
            shape=shape,
            classes=classes,
            model=_MODELS.get(shape, "mlp"),
        )
    _require_known(name)
    if name == "synthetic":
        return replace(
            DATASETS[name],
            shape=synthetic_shape,
            classes=synthetic_classes,
            model=_MODELS.get(synthetic_shape, "mlp"),
        )
    return DATASETS[name]


def require(name: str, *, root: Path | None, download: bool) -> None:
    """Raise UserError unless the data set is known and its files are there or may be
    downloaded.
    """
    if name.startswith(_FILE):
        _require_npz(npz_path(name, root=root))
        return
    _require_known(name)
    if name in ("digits", "synthetic") or (
        name in IDX_FOLDERS and idx_files(name, root=root)
    ):
        return
    if root is None:
        raise UserError(
            f"{name}: no data folder; name one with --data-root (or HPCFED_DATA)"
        )
    missing = _missing_files(name, root)
    if missing and not download:
        raise UserError(
            f"{name}: no {missing}; put the extracted files there, "
            "name another folder with --data-root (or HPCFED_DATA), or add --download"
        )


def idx_files(name: str, *, root: Path | None) -> dict[str, Path] | None:
    """The four files of an MNIST-like set, each plain or gzipped; None unless all are
    there.
    """
    folders = [root / IDX_FOLDERS[name] / "raw"] if root else []
    if name == "fashion-mnist":
        folders.append(DEBIAN_FASHION_MNIST)
    for folder in folders:
        found = [_plain_or_gz(folder / file) for file in _idx_names(name)]
        paths = [path for path in found if path]
        if len(paths) == len(ARRAYS):
            return dict(zip(ARRAYS, paths, strict=True))
    return None


def npz_path(name: str, *, root: Path | None) -> Path:
    """The file that `file:PATH.npz` means: as given, or else below the data root."""
    given = name.removeprefix(_FILE)
    if not given:
        raise UserError("file: needs a path after the colon, e.g. file:photos.npz")
    path = Path(given).expanduser()
    places = [path] if root is None or path.is_absolute() else [path, root / path]
    for place in places:
        if place.is_file():
            return place
    raise UserError(
        f"{name}: no file {' or '.join(map(str, places))}; give the path of an .npz "
        f"with {_listed(ARRAYS)}"
    )


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Whatever a damaged or foreign file makes zipfile, zlib and numpy raise, as one
    line.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{path}: cannot be read ({reason}); save or download it again"
        ) from error


def _require_known(name: str) -> None:
    if name not in DATASETS:
        raise unknown("data set", name, (*DATASETS, "file:PATH.npz"))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _idx_names(name: str) -> list[str]:
    prefixes = (
        ("emnist-byclass-train", "emnist-byclass-test")
        if name == "emnist"
        else ("train", "t10k")
    )
    return [
        f"{prefix}-{kind}"
        for prefix in prefixes
        for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
    ]


def _plain_or_gz(path: Path) -> Path | None:
    gz = path.with_name(path.name + ".gz")
    return path if path.is_file() else gz if gz.is_file() else None


def _missing_files(name: str, root: Path) -> str:
    """The first thing that is missing and where, e.g. `cifar-10-batches-py in /data`;
    nothing if all is there.
    """
    if name not in IDX_FOLDERS:
        return next(
            (
                f"{file} in {root}"
                for file in _TORCHVISION_FILES[name]
                if not (root / file).exists()
            ),
            "",
        )
    folder = root / IDX_FOLDERS[name] / "raw"
    missing = (file for file in _idx_names(name) if not _plain_or_gz(folder / file))
    return next((f"{file} (or .gz) in {folder}" for file in missing), "")


def _require_npz(path: Path) -> None:
    _npz_info(path)
    with opened(path) as archive:
        for array in ("train_images", "test_images"):
            # Integers need no look at their values, so that files of uint8 images are
            # checked by their headers alone.
            if _header(archive, path, array)[1].kind != "f":
                continue
            values = read(archive, array)
            if not np.isfinite(values).all():
                raise UserError(
                    f"{path}: {array} holds NaN or infinite values; remove or replace them"
                )
            if np.abs(values).max() > MOST_VALUE:
                raise UserError(
                    f"{path}: {array} holds values beyond {MOST_VALUE:g}; scale them down"
                )


def _npz_info(path: Path) -> tuple[tuple[int, int, int], int]:
    """Shape and number of classes of a user's file, which is refused when it is not
    what it should be.
    """
    with opened(path) as archive:
        headers = {array: _header(archive, path, array) for array in ARRAYS}
        shapes = [
            _image_shape(path, array, *headers[array])
            for array in ("train_images", "test_images")
        ]
        for split in ("train", "test"):
            _check_labels(path, split, headers)
        _check_memory(path, headers)
        labels = {
            array: read(archive, array) for array in ("train_labels", "test_labels")
        }
    if headers["train_images"][0][1:] != headers["test_images"][0][1:]:
        raise UserError(
            f"{path}: test_images are {shapes[1]}, train_images are {shapes[0]}; give "
            "both the same shape"
        )
    return shapes[0], _classes(path, labels)


@contextmanager
def opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """The archive that an .npz is, if its arrays have one member each, by the name that
    was checked.

    numpy.load would prefer a member `train_images` to `train_images.npy`, whatever is
    in it.
    """
    if not zipfile.is_zipfile(path):
        raise UserError(
            f"{path}: not an .npz file; write one with numpy.savez and the arrays {_listed(ARRAYS)}"
        )
    with readable(path), zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        for array in ARRAYS:
            if names.count(f"{array}.npy") > 1 or array in names:
                raise UserError(
                    f"{path}: {array} is there twice or without .npy; write the file "
                    "with numpy.savez"
                )
        yield archive


def read(archive: zipfile.ZipFile, array: str) -> np.ndarray:
    """Return an array of an archive that was opened here; never unpickles."""
    with archive.open(f"{array}.npy") as file:
        found: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
        return found


def _check_memory(
    path: Path, headers: dict[str, tuple[tuple[int, ...], np.dtype]]
) -> None:
    """Refuse what unpacks to more than the machine holds: a few bytes of a zip file may
    stand for a great many.
    """
    needed, there = (
        sum(math.prod(shape) * dtype.itemsize for shape, dtype in headers.values()),
        memory.usable(),
    )
    if needed > there:
        raise UserError(
            f"{path}: its arrays have {needed / 2**30:,.0f} GiB, this machine has "
            f"{there / 2**30:,.0f}"
        )


def _header(
    archive: zipfile.ZipFile, path: Path, array: str
) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and type of an array, without its data, and without ever unpickling."""
    member = f"{array}.npy"
    if member not in archive.namelist():
        raise UserError(
            f"{path}: no array {array}; the file must hold {_listed(ARRAYS)}"
        )
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        read = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read(file)
        length = file.tell() + math.prod(shape) * dtype.itemsize
    if dtype.hasobject:
        raise UserError(
            f"{path}: {array} holds Python objects (a pickle), which is never loaded; "
            "save plain numbers"
        )
    if archive.getinfo(member).file_size != length:
        raise UserError(f"{path}: {array} is cut short; save the file again")
    return shape, dtype


def _image_shape(
    path: Path, array: str, shape: tuple[int, ...], dtype: np.dtype
) -> tuple[int, int, int]:
    """Channels, height and width of [N, H, W], [N, H, W, C] or [N, C, H, W] with C = 1
    or 3.
    """
    if dtype not in (np.uint8, np.float32, np.float64):
        raise UserError(
            f"{path}: {array} is {dtype}; images must be uint8, float32 or float64"
        )
    if math.prod(shape) == 0:
        raise UserError(f"{path}: {array} is empty; give at least one image")
    match shape:
        case (_, height, width):
            return (1, height, width)
        case (_, 1 | 3, _, 1 | 3):
            raise UserError(
                f"{path}: {array} of shape {list(shape)} may be [N, C, H, W] or [N, H, "
                "W, C]; pad the images"
            )
        case (_, 1 | 3 as channels, height, width) | (
            _,
            height,
            width,
            1 | 3 as channels,
        ):
            return (channels, height, width)
    raise UserError(
        f"{path}: {array} has shape {list(shape)}; "
        "it must be [N, H, W], [N, H, W, C] or [N, C, H, W] with 1 or 3 channels"
    )


def _check_labels(
    path: Path, split: str, headers: dict[str, tuple[tuple[int, ...], np.dtype]]
) -> None:
    shape, dtype = headers[f"{split}_labels"]
    samples = headers[f"{split}_images"][0][0]
    if dtype.kind not in "iu":
        raise UserError(
            f"{path}: {split}_labels is {dtype}; labels must be integers 0, 1, 2, …"
        )
    if len(shape) != 1:
        raise UserError(
            f"{path}: {split}_labels has shape {list(shape)}; it must be one row of "
            f"{samples} labels"
        )
    if shape[0] != samples:
        raise UserError(
            f"{path}: {split}_labels has {shape[0]} labels for {samples} images; give "
            "each image one label"
        )


def _classes(path: Path, labels: dict[str, np.ndarray]) -> int:
    for array, values in labels.items():
        if int(values.min()) < 0:
            raise UserError(
                f"{path}: {array} holds {int(values.min())}; number the classes 0, 1, 2, …"
            )
    train, test = labels["train_labels"], labels["test_labels"]
    classes = int(train.max()) + 1
    # A model has an output per class: a label that is really an identifier must not ask
    # for a billion of them.
    if classes > len(train):
        raise UserError(
            f"{path}: train_labels holds {classes - 1} among only {len(train)} "
            "samples; number the classes 0, 1, 2, …"
        )
    if int(test.max()) >= classes:
        raise UserError(
            f"{path}: test_labels holds {int(test.max())}, train_labels only 0 to {classes - 1}"
        )
    return classes
