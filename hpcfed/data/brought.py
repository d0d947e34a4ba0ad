"""Data that users bring, by its name: an .npz file, a table, JSON lines, a folder of
texts, a Hugging Face data set on disk, or a function. Nothing is ever unpickled.
"""

import math
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from hpcfed.data import DATASETS, Reading, hf_folder, json_lines, own, table, text
from hpcfed.data.array_checks import describe
from hpcfed.data.arrays import (
    KNOWN,
    NAMES,
    Description,
    Header,
    InMemory,
    Source,
    check_values,
    find,
    read_all,
    remarks,
    version,
    with_owned_test,
)
from hpcfed.errors import UserError

FORMS = (
    *("file:PATH.npz", "PATH.csv", "PATH.jsonl", "text:DIR", "hf-data:DIR"),
    "FILE.py:NAME",
)
"""How such data is named, for messages."""


def is_file_name(name: str) -> bool:
    """Tell whether a data set's name refers to arrays in a user's .npz file."""
    return name.startswith("file:") and not (
        table.is_table(name) or json_lines.is_lines(name)
    )


def is_brought(name: str) -> bool:
    """Tell whether a name refers to a user's data."""
    if name in DATASETS:
        return False
    if is_file_name(name) or table.is_table(name) or json_lines.is_lines(name):
        return True
    return text.is_text(name) or hf_folder.is_hf(name) or own.is_own(name)


def place(name: str, *, root: Path | None) -> str:
    """Return where the data is, or what makes it."""
    if is_file_name(name):
        return str(_find_npz(name, root))
    if table.is_table(name):
        return str(table.find_table(name, root=root))
    if json_lines.is_lines(name):
        return str(json_lines.find_lines(name, root=root))
    if text.is_text(name):
        return str(text.find_texts(name, root=root))
    return name


def require(name: str, *, root: Path | None, reading: Reading) -> None:
    """Raise UserError unless the data is valid, including its numbers."""
    _check_once(name, root, _plain(reading), *_version(name, root))


def about(name: str, *, root: Path | None, reading: Reading) -> Description:
    """Return a description of the data."""
    return _about(name, root, _plain(reading), *_version(name, root))


def read(name: str, *, root: Path | None, reading: Reading) -> dict[str, np.ndarray]:
    """Return the data's arrays, as `arrays.read_all` does."""
    with _opened(name, root, _plain(reading)) as source:
        arrays = read_all(source, describe(source))
    return with_owned_test(arrays) if reading.natural else arrays


def notes(name: str, *, root: Path | None, reading: Reading) -> tuple[str, ...]:
    """Return what was cut, left out or chosen while the data was read."""
    with _opened(name, root, _plain(reading)) as source:
        return *source.notes, *remarks(source, about(name, root=root, reading=reading))


def texts(name: str, *, root: Path | None, reading: Reading) -> InMemory:
    """Return the arrays of data that is text, with its language."""
    with _opened(name, root, _plain(reading)) as source:
        assert isinstance(source, InMemory) and source.language is not None
        return source


def forget() -> None:
    """Forget all data that was read: a program may have changed it since its last run."""
    readers = (own.loaded, table.read_table, hf_folder.read_hf, text.loaded)
    for kept in (_about, _check_once, *readers):
        kept.cache_clear()


def is_language(name: str) -> bool:
    """Tell whether a data set's tokens can be written as text."""
    return text.is_text(name) or json_lines.is_lines(name)


def _plain(reading: Reading) -> Reading:
    """Return how the arrays are made, without later processing."""
    return replace(reading, natural=False)


def _version(name: str, root: Path | None) -> tuple[int, ...]:
    """Return what changes if a file is written again; other data stays in memory."""
    if is_file_name(name):
        return version(_find_npz(name, root))
    if json_lines.is_lines(name):
        return version(json_lines.find_lines(name, root=root))
    return ()


# Cached: a command line asks several times, and there may be many tokens.
@cache
def _about(
    name: str, root: Path | None, reading: Reading, *_version: int
) -> Description:
    with _opened(name, root, reading) as source:
        return describe(source)


@cache
def _check_once(name: str, root: Path | None, reading: Reading, *version: int) -> None:
    with _opened(name, root, reading) as source:
        check_values(source, _about(name, root, reading, *version))


@contextmanager
def _opened(name: str, root: Path | None, reading: Reading) -> Iterator[Source]:
    """Open the user's arrays; those of an .npz are read one by one."""
    if is_file_name(name):
        path = _find_npz(name, root)
        with _archive(path) as archive:
            yield _Members(str(path), archive)
    elif table.is_table(name):
        yield table.read_table(table.find_table(name, root=root), reading.options)
    elif json_lines.is_lines(name):
        path = json_lines.find_lines(name, root=root)
        yield json_lines.loaded(path, reading.options, reading.text, version(path))
    elif text.is_text(name):
        yield text.loaded(text.find_texts(name, root=root), reading.text)
    elif hf_folder.is_hf(name):
        yield hf_folder.read_hf(hf_folder.find_hf(name, root=root), reading.options)
    else:
        yield own.loaded(name, reading.options)


def _find_npz(name: str, root: Path | None) -> Path:
    wanted = f"the path of an .npz with {', '.join(NAMES)}"
    return find(name, "file:photos.npz", root=root, wanted=wanted)


@dataclass(frozen=True)
class _Members(Source):
    """The arrays of an open .npz file."""

    where: str
    archive: zipfile.ZipFile
    whole: str = "the file"

    def names(self) -> Collection[str]:
        stored = self.archive.namelist()
        return {name.removesuffix(".npy") for name in stored if name.endswith(".npy")}

    def header(self, array: str) -> Header:
        """Return shape and type of an array, without reading its data."""
        member = f"{array}.npy"
        with self.archive.open(member) as file:
            if np.lib.format.read_magic(file) == (1, 0):
                shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            else:
                shape, _, dtype = np.lib.format.read_array_header_2_0(file)
            # A header may claim more than the member holds.
            length = file.tell() + math.prod(shape) * dtype.itemsize
        if dtype.hasobject:
            raise self.wrong(
                f"{array} holds Python objects (a pickle), which is never loaded; save "
                "plain numbers"
            )
        if self.archive.getinfo(member).file_size != length:
            raise self.wrong(f"{array} is cut short; save the file again")
        return shape, dtype

    def read(self, array: str) -> np.ndarray:
        with self.archive.open(f"{array}.npy") as file:
            # Not numpy.load, which chooses the member itself.
            found: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
            return found


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn anything that a damaged file makes zipfile, zlib and numpy raise into a line."""
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
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
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
            # Readers of a zip differ in which of two members with one name they take.
            if names.count(f"{array}.npy") > 1 or array in names:
                raise UserError(
                    f"{path}: {array} is there twice or without .npy; write the file "
                    "with numpy.savez"
                )
        yield archive
