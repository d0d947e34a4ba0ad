"""Untrusted HDF5 files: refuse them unless they are self-contained, and never read more
than their own size.

HDF5 lets a file refer to others (external links, external storage, virtual datasets),
request filters that unpack any amount, and declare any shape without storing it. hpcfed
writes none of that, so all of it is refused, by name, before a number is read.
`sandbox.py` has the other half: libhdf5 itself may crash on a damaged file.
"""

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcfed.errors import UserError

MOST_BYTES = 4 * 2**30
"""Largest file that is read as a whole."""
SLACK = 64 * 2**20
"""Bytes to read beyond a file's size: data that was never written is not in it."""
SPARSE = 2**30, 1000
"""A file of at least 2**30 bytes was never written as a whole if the disk holds less
than one in 1000 of them.
"""
MOST_TEXT = 16 * 2**20
MOST_ENTRIES = 100_000
"""Most strings in a list."""
MOST_OBJECTS = 500_000
MOST_DEPTH = 12
MOST_FACTS = 1000
MOST = 1e30
"""Upper limit for any number of seconds, bytes or clients."""


class Reader:
    """A group of an untrusted file; other types, shapes and sizes are ValueErrors."""

    def __init__(self, group: h5py.Group, left: list[int]) -> None:
        """`left`: bytes that all readers of the file may still read."""
        self._group = group
        self._left = left

    def __contains__(self, name: str) -> bool:
        return name in self._group

    def names(self) -> list[str]:
        """Return the names in the group, in order."""
        return sorted(self._group)

    def within(self, name: str) -> "Reader":
        """Return a reader for a subgroup."""
        group = self._group[name]
        if not isinstance(group, h5py.Group):
            raise ValueError(f"{name} is not a group")
        return Reader(group, self._left)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a dataset."""
        return tuple(self._dataset(name).shape)

    def facts(self) -> dict[str, Any]:
        """Read the attributes."""
        attributes = self._group.attrs
        if len(attributes) > MOST_FACTS:
            raise ValueError(f"it has {len(attributes)} attributes")
        facts = {}
        for name in attributes:
            # Check before reading, since reading allocates the declared size.
            declared = attributes.get_id(name)
            size = declared.get_storage_size()
            if prod(declared.shape) > MOST_ENTRIES or size > MOST_TEXT:
                raise ValueError(f"its attribute {name} is too large")
            value = attributes[name]
            # Python has no type for it, and .item() would return it unchanged.
            if isinstance(value, np.longdouble):
                raise ValueError(f"its attribute {name} is not a number of 64 bits")
            facts[name] = value.item() if isinstance(value, np.generic) else value
            if isinstance(facts[name], str):
                self._text(name, facts[name])
        return facts

    def numbers(
        self, name: str, shape: tuple[int | None, ...], first: int | None = None
    ) -> np.ndarray:
        """Read an array of this shape (None: any length), or only its first entries."""
        data = self._dataset(name)
        fits = len(data.shape) == len(shape)
        for found, asked in zip(data.shape, shape, strict=False):
            fits = fits and asked in (found, None)
        if not fits:
            raise ValueError(f"{name} has the shape {data.shape}")
        if data.dtype.kind not in "fiu" or data.dtype.itemsize > 8:
            raise ValueError(f"{name} does not hold numbers")
        taken = data.shape
        if first is not None:
            if first > data.shape[0]:
                raise ValueError(f"{name} has {data.shape[0]} of {first} rounds")
            taken = (first, *data.shape[1:])
        self._spend(name, prod(taken) * data.dtype.itemsize)
        read = data[()] if first is None else data[:first]
        values: np.ndarray = np.asarray(read)
        # The file may come from a machine with the other byte order.
        return values.astype(values.dtype.newbyteorder("="), copy=False)

    def between(
        self,
        name: str,
        shape: tuple[int | None, ...],
        first: int | None = None,
        *,
        high: float = MOST,
        known: bool = False,
    ) -> np.ndarray:
        """Read numbers from 0 to `high`, or NaN unless all are `known`, as 64-bit
        floats.
        """
        values = self.numbers(name, shape, first)
        # `high` may overflow a file's short floats.
        with np.errstate(over="ignore"):
            wrong = (values < 0) | (values > high)
        if known:
            wrong |= np.isnan(values)
        if wrong.any():
            raise ValueError(f"{name} holds impossible numbers")
        return values.astype(np.float64, copy=False)

    def text(self, name: str) -> str:
        """Read a single text."""
        data = self._dataset(name)
        if data.shape != ():
            raise ValueError(f"{name} is not a single text")
        return self._text(name, data.asstr()[()])

    def texts(self, name: str) -> list[str]:
        """Read a list of texts."""
        data = self._dataset(name)
        if len(data.shape) != 1 or data.shape[0] > MOST_ENTRIES:
            raise ValueError(f"{name} is not a list, or is too long")
        strings = data.asstr()
        # One by one: all may point to one long string, which the file holds only once.
        return [self._text(name, strings[number]) for number in range(data.shape[0])]

    def _dataset(self, name: str) -> h5py.Dataset:
        data = self._group[name]
        if not isinstance(data, h5py.Dataset) or data.shape is None:
            raise ValueError(f"{name} is not a dataset, or is empty")
        item = data.dtype.itemsize
        # libhdf5 allocates a whole chunk to read one entry of it.
        chunk = prod(data.chunks) * item if data.chunks else 0
        if item > MOST_TEXT or chunk > SLACK:
            raise ValueError(f"{name} has entries or chunks that are too large")
        return data

    def _text(self, name: str, text: Any) -> str:
        if not isinstance(text, str) or len(text) > MOST_TEXT:
            raise ValueError(f"{name} is not a text, or is too long")
        # Encoding rejects lone surrogates, which cannot be printed.
        self._spend(name, len(text.encode()))
        return text

    def _spend(self, name: str, count: int) -> None:
        if count > self._left[0]:
            # A few bytes of a file can declare a huge array of fill values.
            raise ValueError(f"{name} declares more than the file holds")
        self._left[0] -= count


@contextmanager
def readable(path: Path, kind: str) -> Iterator[None]:
    """Turn any exception over a damaged or hostile file into one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"{path} cannot be read as {kind}: {reason}") from None


def check_file(path: Path, most: int = 2**62) -> int:
    """Return the size of a plain file; raise a ValueError if it is not a plain file, is
    larger than `most`, or is nothing but holes.
    """
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise ValueError("it is a link, which is not followed")
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is not a plain file")
    size = found.st_size
    if size > most:
        raise ValueError(f"it has {size:,} bytes; hpcfed reads at most {most:,}")
    # st_blocks counts units of 512 bytes, whatever the disk's block size.
    least_size, share = SPARSE
    if size >= least_size and found.st_blocks * 512 * share < size:
        raise ValueError("it was never written as a whole")
    return size


def check_answers(path: Path) -> None:
    """Refuse a file that the disk cannot read at the moment. A damaged one may be
    replaced, but this one may be whole.
    """
    try:
        with path.open("rb") as file:
            file.read(1)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}; it is not replaced. Try again "
            "when it can be, or remove it"
        ) from None


@contextmanager
def reading(path: Path, most: int = MOST_BYTES) -> Iterator[Reader]:
    """Open a file that is to be read as a whole."""
    size = path.stat().st_size
    if size > most:
        raise ValueError(f"it has {size:,} bytes; hpcfed reads at most {most:,}")
    with h5py.File(path, "r") as file:
        check(file)
        # A list, because all readers of the file spend from the same budget.
        yield Reader(file, [size + SLACK])


@contextmanager
def checked(path: Path, kind: str, mode: str = "r") -> Iterator[h5py.File]:
    """Open a self-contained file; any exception within the block becomes one line."""
    with readable(path, kind), h5py.File(path, mode) as file:
        check(file)
        yield file


def check(file: h5py.File) -> None:
    """Refuse a file that is not self-contained."""
    for _ in objects(file):
        pass


def objects(file: h5py.File) -> Iterator[Any]:
    """Iterate over the ids of all groups and datasets. Objects with several names, even
    inside themselves, come once. Raise a ValueError for a reference to another file.
    """
    seen: set[int] = set()
    yield h5py.h5g.open(file.id, b"/")
    level = [(file.id, "")]
    for _ in range(MOST_DEPTH):
        below = []
        for group, path in level:
            for name in group:
                where = f"{path}/{name.decode(errors='replace')}"
                item = _opened(group, name, where, seen)
                if isinstance(item, h5py.h5d.DatasetID):
                    _check_dataset(item, where)
                    yield item
                elif isinstance(item, h5py.h5g.GroupID):
                    below.append((item, where))
                    yield item
        if not below:
            return
        level = below
    raise ValueError(f"its groups are nested more than {MOST_DEPTH} deep")


def _opened(group: Any, name: bytes, where: str, seen: set[int]) -> Any:
    """Open an object of a group unless it was `seen`; refuse links to other files."""
    link = group.links.get_info(name)
    if link.type == h5py.h5l.TYPE_SOFT:
        # A soft link's target is in this file, and is checked there.
        return None
    if link.type != h5py.h5l.TYPE_HARD:
        raise ValueError(f"{where} is a link to another file, which is never followed")
    # A hard link's `u` is the address of its object.
    if link.u in seen:
        return None
    seen.add(link.u)
    if len(seen) > MOST_OBJECTS:
        raise ValueError(f"it holds more than {MOST_OBJECTS:,} objects")
    return h5py.h5o.open(group, name)


def _check_dataset(data: h5py.h5d.DatasetID, where: str) -> None:
    """Refuse a dataset whose numbers are stored elsewhere or packed."""
    creation = data.get_create_plist()
    if creation.get_layout() == h5py.h5d.VIRTUAL:
        raise ValueError(
            f"{where} is a virtual dataset, whose numbers may be in other files"
        )
    if creation.get_external_count():
        raise ValueError(
            f"{where} keeps its numbers in another file, which is never read"
        )
    for number in range(creation.get_nfilters()):
        # Unlike any other filter, a checksum cannot expand a few bytes into many.
        if creation.get_filter(number)[0] != h5py.h5z.FILTER_FLETCHER32:
            raise ValueError(
                f"{where} is packed; hpcfed writes and reads plain numbers with checksums"
            )
