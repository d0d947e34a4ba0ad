"""A user's own `file:PATH.npz`: where the file is, and whether it is valid.

`arrays` says what it may hold. Nothing is ever unpickled.
"""

import math
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from hpcfed.data.array_source import KNOWN, NAMES, Header
from hpcfed.data.arrays import Description, check_values, describe, read_all
from hpcfed.data.places import find_file
from hpcfed.data.table import is_table
from hpcfed.errors import UserError

_PREFIX = "file:"


def is_file_name(name: str) -> bool:
    """Whether a data set's name refers to arrays in a user's own file."""
    return name.startswith(_PREFIX) and not is_table(name)


def find(name: str, *, root: Path | None) -> Path:
    """Return the file of `file:PATH.npz`: as given, or else below the root."""
    return find_file(
        name,
        _PREFIX,
        root=root,
        example="photos.npz",
        wanted=f"an .npz with {', '.join(NAMES)}",
    )


def require(path: Path) -> None:
    """Raise UserError unless the file is valid, including its numbers."""
    with _opened(path) as archive:
        source = _Members(str(path), archive)
        check_values(source, describe(source))


def about(path: Path) -> Description:
    """Return what the file holds, from headers, labels, tokens and owners."""
    found = path.stat()
    return _about(path, found.st_ino, found.st_size, found.st_mtime_ns)


# Cached: a command line asks several times, and there may be many tokens.
@cache
def _about(path: Path, *_version: int) -> Description:
    with _opened(path) as archive:
        return describe(_Members(str(path), archive))


def read(path: Path) -> dict[str, np.ndarray]:
    """Return all arrays, as `arrays.read_all` does."""
    with _opened(path) as archive:
        source = _Members(str(path), archive)
        return read_all(source, describe(source))


@dataclass(frozen=True)
class _Members:
    """The arrays of an open file."""

    where: str
    archive: zipfile.ZipFile
    whole: str = "the file"

    def names(self) -> Collection[str]:
        stored = self.archive.namelist()
        return {name.removesuffix(".npy") for name in stored if name.endswith(".npy")}

    def header(self, array: str) -> Header:
        return _header(self.archive, self.where, array)

    def read(self, array: str) -> np.ndarray:
        with self.archive.open(f"{array}.npy") as file:
            # Not numpy.load, which chooses the member itself.
            found: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
            return found


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn anything that zipfile, zlib and numpy raise for a damaged file into one
    line.
    """
    try:
        yield
    except UserError:
        raise
    # Catch everything: what a broken file raises is not documented.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{path}: cannot be read ({reason}); save or download it again"
        ) from error


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open the archive of an .npz file; refuse one with two members for an array.

    numpy.load would prefer a member `train_images` to `train_images.npy`, whatever its
    content. Then the checked array might not be the one that is read.
    """
    if not zipfile.is_zipfile(path):
        raise UserError(
            f"{path}: not an .npz file; write one with numpy.savez and the arrays "
            f"{', '.join(NAMES)}"
        )
    with readable(path), zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        for array in KNOWN:
            if names.count(f"{array}.npy") > 1 or array in names:
                raise UserError(
                    f"{path}: {array} is there twice or without .npy; write the file "
                    "with numpy.savez"
                )
        yield archive


def _header(archive: zipfile.ZipFile, path: str, array: str) -> Header:
    """Return shape and type of an array, without reading its data."""
    member = f"{array}.npy"
    with archive.open(member) as file:
        if np.lib.format.read_magic(file) == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        else:
            shape, _, dtype = np.lib.format.read_array_header_2_0(file)
        # A header may claim more than the member holds.
        length = file.tell() + math.prod(shape) * dtype.itemsize
    if dtype.hasobject:
        raise UserError(
            f"{path}: {array} holds Python objects (a pickle), which is never loaded; "
            "save plain numbers"
        )
    if archive.getinfo(member).file_size != length:
        raise UserError(f"{path}: {array} is cut short; save the file again")
    return shape, dtype
