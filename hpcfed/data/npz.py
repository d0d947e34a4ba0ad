"""A user's own images, `file:PATH.npz`: where the file is, and whether it is sound.

Headers and labels are checked before anything starts, without torch. Nothing is ever
unpickled.
"""

import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from hpcfed.errors import UserError
from hpcfed.runtime import memory

ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")
LARGEST_VALUE = 1e15
"""The largest value of an image: squares of it are summed in float32."""

_PREFIX = "file:"
Header = tuple[tuple[int, ...], np.dtype]
"""Shape and type of an array."""


def is_file_name(name: str) -> bool:
    """Whether a data set's name means a user's own file."""
    return name.startswith(_PREFIX)


def find(name: str, *, root: Path | None) -> Path:
    """Return the file that `file:PATH.npz` means: as given, or else below the root."""
    given = name.removeprefix(_PREFIX)
    if not given:
        raise UserError("file: needs a path after the colon, e.g. file:photos.npz")
    path = Path(given).expanduser()
    # The path as given comes first: a shell completes it so.
    candidates = [path]
    if root is not None and not path.is_absolute():
        candidates.append(root / path)
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise UserError(
        f"{name}: no file {' or '.join(map(str, candidates))}; give the path of an "
        f".npz with {', '.join(ARRAYS)}"
    )


def require(path: Path) -> None:
    """Raise UserError unless the file is what it should be, its images included."""
    shape_and_classes(path)
    with _opened(path) as archive:
        for array in ("train_images", "test_images"):
            # Integers need no look at their values, so files of uint8 images are
            # checked by their headers alone.
            _, dtype = _header(archive, path, array)
            if dtype.kind == "f":
                _check_values(path, array, _read(archive, array))


def shape_and_classes(path: Path) -> tuple[tuple[int, int, int], int]:
    """Return the shape of an image and the number of classes, from headers and labels."""
    with _opened(path) as archive:
        headers = {array: _header(archive, path, array) for array in ARRAYS}
        train_shape = _image_shape(path, "train_images", headers)
        test_shape = _image_shape(path, "test_images", headers)
        _check_labels_header(path, "train", headers)
        _check_labels_header(path, "test", headers)
        # Before anything is unpacked.
        _check_memory(path, headers)
        train_labels = _read(archive, "train_labels")
        test_labels = _read(archive, "test_labels")
    # Stored shapes, not image shapes: both splits must have the same order of axes too.
    if headers["train_images"][0][1:] != headers["test_images"][0][1:]:
        raise UserError(
            f"{path}: test_images are {test_shape}, train_images are {train_shape}; "
            "give both the same shape"
        )
    return train_shape, _num_classes(path, train_labels, test_labels)


def read_all(path: Path, shape: tuple[int, int, int]) -> dict[str, np.ndarray]:
    """Return all arrays, images as [samples, channels, height, width]."""
    with _opened(path) as archive:
        arrays = {array: _read(archive, array) for array in ARRAYS}
    for array in ("train_images", "test_images"):
        arrays[array] = _channels_first(arrays[array], shape)
    return arrays


def _channels_first(images: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    if images.ndim == 3:
        return images[:, None]
    return images if images.shape[1:] == shape else images.transpose(0, 3, 1, 2)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn whatever a damaged file makes zipfile, zlib and numpy raise into one line."""
    try:
        yield
    except UserError:
        raise
    # All of them: what a broken file raises is not documented anywhere.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{path}: cannot be read ({reason}); save or download it again"
        ) from error


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open the archive that an .npz is; refuse one with two members for an array.

    numpy.load would prefer a member `train_images` to `train_images.npy`, whatever is
    in it, so what was checked need not be what is read.
    """
    if not zipfile.is_zipfile(path):
        raise UserError(
            f"{path}: not an .npz file; write one with numpy.savez and the arrays "
            f"{', '.join(ARRAYS)}"
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


def _read(archive: zipfile.ZipFile, array: str) -> np.ndarray:
    with archive.open(f"{array}.npy") as file:
        # Not numpy.load, which chooses the member itself.
        found: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
        return found


def _header(archive: zipfile.ZipFile, path: Path, array: str) -> Header:
    """Return shape and type of an array, without reading its data."""
    member = f"{array}.npy"
    if member not in archive.namelist():
        raise UserError(
            f"{path}: no array {array}; the file must hold {', '.join(ARRAYS)}"
        )
    with archive.open(member) as file:
        if np.lib.format.read_magic(file) == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        else:
            shape, _, dtype = np.lib.format.read_array_header_2_0(file)
        # A header may promise more than the member holds.
        length = file.tell() + math.prod(shape) * dtype.itemsize
    if dtype.hasobject:
        raise UserError(
            f"{path}: {array} holds Python objects (a pickle), which is never loaded; "
            "save plain numbers"
        )
    if archive.getinfo(member).file_size != length:
        raise UserError(f"{path}: {array} is cut short; save the file again")
    return shape, dtype


def _check_memory(path: Path, headers: dict[str, Header]) -> None:
    """Refuse a file that unpacks to more than the machine holds.

    A few bytes of a zip file may stand for a great many.
    """
    needed = 0
    for shape, dtype in headers.values():
        needed += math.prod(shape) * dtype.itemsize
    usable = memory.usable()
    if needed > usable:
        raise UserError(
            f"{path}: its arrays have {needed / 2**30:,.0f} GiB, this machine has "
            f"{usable / 2**30:,.0f}"
        )


def _image_shape(
    path: Path, array: str, headers: dict[str, Header]
) -> tuple[int, int, int]:
    """Return channels, height and width of the images.

    They may be [N, H, W], [N, H, W, C] or [N, C, H, W] with C = 1 or 3.
    """
    shape, dtype = headers[array]
    if dtype not in (np.uint8, np.float32, np.float64):
        raise UserError(
            f"{path}: {array} is {dtype}; images must be uint8, float32 or float64"
        )
    if math.prod(shape) == 0:
        raise UserError(f"{path}: {array} is empty; give at least one image")
    match shape:
        case (_, height, width):
            return (1, height, width)
        # Channels could be either axis: a guess might train on nonsense.
        case (_, 1 | 3, _, 1 | 3):
            raise UserError(
                f"{path}: {array} of shape {list(shape)} may be [N, C, H, W] or [N, H, "
                "W, C]; pad the images"
            )
        case (_, 1 | 3 as channels, height, width):
            return (channels, height, width)
        case (_, height, width, 1 | 3 as channels):
            return (channels, height, width)
    raise UserError(
        f"{path}: {array} has shape {list(shape)}; "
        "it must be [N, H, W], [N, H, W, C] or [N, C, H, W] with 1 or 3 channels"
    )


def _check_labels_header(path: Path, split: str, headers: dict[str, Header]) -> None:
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


def _check_values(path: Path, array: str, values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise UserError(
            f"{path}: {array} holds NaN or infinite values; remove or replace them"
        )
    if np.abs(values).max() > LARGEST_VALUE:
        raise UserError(
            f"{path}: {array} holds values beyond {LARGEST_VALUE:g}; scale them down"
        )


def _num_classes(path: Path, train: np.ndarray, test: np.ndarray) -> int:
    """Return one more than the largest training label."""
    for array, labels in (("train_labels", train), ("test_labels", test)):
        if int(labels.min()) < 0:
            raise UserError(
                f"{path}: {array} holds {int(labels.min())}; number the classes 0, 1, "
                "2, …"
            )
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
            f"{path}: test_labels holds {int(test.max())}, train_labels only 0 to "
            f"{classes - 1}"
        )
    return classes
