"""Untrusted HDF5 files: refuse them unless they are self-contained, and never read more
than their own size.

HDF5 lets a file refer to others (external links, external storage, virtual datasets),
request filters that unpack any amount, and declare any shape without storing it. hpcfed
writes none of that, so all of it is refused, by name, before a number is read.
`sandbox.py` has the other half: libhdf5 itself may crash on a damaged file.
"""

import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
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
MOST_KEPT = 10_000
"""Most objects of a file that stay open while it is read."""
MOST_DEPTH = 12
MOST_FACTS = 1000
MOST = 1e30
"""Upper limit for any number of seconds, bytes or clients."""


@dataclass(frozen=True)
class Contents:
    """The objects that a check has opened. To look one up again takes longer than to
    read it.
    """

    opened: Mapping[bytes, Any] = field(default_factory=dict)
    """Ids by path."""
    whole: bool = False
    """Whether the file holds no other objects, and no other names of them."""

    @classmethod
    def of(cls, file: h5py.File) -> "Contents":
        """Check a file and return its contents."""
        opened: dict[bytes, Any] = {}
        whole = True
        for path, item in objects(file):
            if item is None or len(opened) == MOST_KEPT:
                whole = False
            else:
                opened[path] = item
        return cls(opened, whole)


class Reader:
    """A group of an untrusted file; other types, shapes and sizes are ValueErrors."""

    def __init__(
        self,
        group: h5py.Group,
        left: list[int],
        contents: Contents | None = None,
        path: bytes = b"",
    ) -> None:
        """`left`: bytes that all readers of the file may still read. `path`: where the
        contents have the group.
        """
        self._group = group
        self._left = left
        self._contents = contents or Contents()
        self._path = path

    def __contains__(self, name: str) -> bool:
        if self._at(name) in self._contents.opened:
            return True
        return not self._contents.whole and name in self._group

    def names(self) -> list[str]:
        """Return the names in the group, in order."""
        return sorted(self._group)

    def within(self, name: str) -> "Reader":
        """Return a reader for a subgroup."""
        item = self._object(name)
        if not isinstance(item, h5py.h5g.GroupID):
            raise ValueError(f"{name} is not a group")
        return Reader(h5py.Group(item), self._left, self._contents, self._at(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a dataset."""
        return self._dataset(name).shape

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
        return data.read(taken)

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
        return self._text(name, data.strings()[()])

    def texts(self, name: str) -> list[str]:
        """Read a list of texts."""
        data = self._dataset(name)
        if len(data.shape) != 1 or data.shape[0] > MOST_ENTRIES:
            raise ValueError(f"{name} is not a list, or is too long")
        strings = data.strings()
        # One by one: all may point to one long string, which the file holds only once.
        return [self._text(name, strings[number]) for number in range(data.shape[0])]

    def _dataset(self, name: str) -> "_Dataset":
        item = self._object(name)
        if not isinstance(item, h5py.h5d.DatasetID):
            raise ValueError(f"{name} is not a dataset")
        if item.get_space().get_simple_extent_type() == h5py.h5s.NULL:
            raise ValueError(f"{name} is empty")
        size = item.dtype.itemsize
        # libhdf5 allocates a whole chunk to read one entry of it.
        creation = item.get_create_plist()
        chunked = creation.get_layout() == h5py.h5d.CHUNKED
        chunk = prod(creation.get_chunk()) * size if chunked else 0
        if size > MOST_TEXT or chunk > SLACK:
            raise ValueError(f"{name} has entries or chunks that are too large")
        return _Dataset(item, item.shape, item.dtype)

    def _object(self, name: str) -> Any:
        """Return the id of a group or dataset."""
        found = self._contents.opened.get(self._at(name))
        return self._group[name].id if found is None else found

    def _at(self, name: str) -> bytes:
        return self._path + b"/" + name.encode()

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


@dataclass(frozen=True)
class _Dataset:
    item: h5py.h5d.DatasetID
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def read(self, shape: tuple[int, ...]) -> np.ndarray:
        """Read the first numbers, in this machine's order of bytes."""
        values: np.ndarray = np.empty(shape, self.dtype.newbyteorder("="))
        if values.size == 0:
            return values
        if shape == self.shape:
            self.item.read(h5py.h5s.ALL, h5py.h5s.ALL, values)
            return values
        chosen = self.item.get_space()
        chosen.select_hyperslab((0,) * len(shape), shape)
        self.item.read(h5py.h5s.create_simple(shape), chosen, values)
        return values

    def strings(self) -> Any:
        return h5py.Dataset(self.item).asstr()


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
        # A list, because all readers of the file spend from the same budget.
        yield Reader(file, [size + SLACK], Contents.of(file))


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


def objects(file: h5py.File) -> Iterator[tuple[bytes, Any]]:
    """Iterate over the paths and ids of all groups and datasets. Objects with several
    names, even inside themselves, come once; their other names have None. Raise a
    ValueError for a reference to another file.
    """
    seen: set[int] = set()
    yield b"/", h5py.h5g.open(file.id, b"/")
    level = [(file.id, b"")]
    for _ in range(MOST_DEPTH):
        below = []
        for group, path in level:
            for name in group:
                where = path + b"/" + name
                item = _opened(group, name, where, seen)
                if isinstance(item, h5py.h5d.DatasetID):
                    _check_dataset(item, where)
                elif isinstance(item, h5py.h5g.GroupID):
                    below.append((item, where))
                else:
                    item = None
                yield where, item
        if not below:
            return
        level = below
    raise ValueError(f"its groups are nested more than {MOST_DEPTH} deep")


def _opened(group: Any, name: bytes, where: bytes, seen: set[int]) -> Any:
    """Open an object of a group unless it was `seen`; refuse links to other files."""
    link = group.links.get_info(name)
    if link.type == h5py.h5l.TYPE_SOFT:
        # A soft link's target is in this file, and is checked there.
        return None
    if link.type != h5py.h5l.TYPE_HARD:
        raise ValueError(
            f"{_shown(where)} is a link to another file, which is never followed"
        )
    # A hard link's `u` is the address of its object.
    if link.u in seen:
        return None
    seen.add(link.u)
    if len(seen) > MOST_OBJECTS:
        raise ValueError(f"it holds more than {MOST_OBJECTS:,} objects")
    return h5py.h5o.open(group, name)


def _shown(path: bytes) -> str:
    return path.decode(errors="replace")


def _check_dataset(data: h5py.h5d.DatasetID, where: bytes) -> None:
    """Refuse a dataset whose numbers are stored elsewhere or packed."""
    creation = data.get_create_plist()
    if creation.get_layout() == h5py.h5d.VIRTUAL:
        raise ValueError(
            f"{_shown(where)} is a virtual dataset, whose numbers may be in other files"
        )
    if creation.get_external_count():
        raise ValueError(
            f"{_shown(where)} keeps its numbers in another file, which is never read"
        )
    for number in range(creation.get_nfilters()):
        # Unlike any other filter, a checksum cannot expand a few bytes into many.
        if creation.get_filter(number)[0] != h5py.h5z.FILTER_FLETCHER32:
            raise ValueError(
                f"{_shown(where)} is packed; hpcfed writes and reads plain numbers with checksums"
            )
