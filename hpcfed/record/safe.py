"""HDF5 files that anybody may have handed in: refused unless they stand alone, and read
within their own size.

HDF5 lets a file name others (external links, external storage, virtual datasets), ask
for filters that unpack any amount, and declare any shape without holding it. None of
that is in what hpcfed writes, so all of it is refused, by name, before a number is
read. libhdf5 itself may crash or never return on a damaged file (2.0.0 loops on a
global heap with zeros in it), so commands that are handed files let a child process try
them first.
"""

import mmap
import os
import resource
import signal
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcfed.errors import UserError

MOST_BYTES = 4 * 2**30
"""Of a file that is read as a whole."""
SLACK = 64 * 2**20
"""Bytes that may be read beyond a file's size: what was declared and never written is
not in it.
"""
SPARSE = 2**30, 1000
"""A file of so many bytes, of which the disk has not even one in so many, was never
written as a whole.
"""
MOST_TEXT = 16 * 2**20
MOST_ENTRIES = 100_000
"""Strings of a list."""
MOST_OBJECTS = 500_000
MOST_DEPTH = 12
MOST_FACTS = 1000


PATIENCE, SPEED = 5, 4 * 2**20
"""Seconds of a core that trying a file may take, and bytes that give it one more."""
DAMAGED = 3
MEMORY = 2**30
"""Bytes that trying a file may take beyond thrice its size."""


class Reader:
    """A group of such a file. What does not have the type, shape and size that is asked
    for is a ValueError.
    """

    def __init__(self, group: h5py.Group, left: list[int]) -> None:
        """`left` is the number of bytes that may still be read, shared by all readers
        of a file.
        """
        self._group, self._left = group, left

    def __contains__(self, name: str) -> bool:
        return name in self._group

    def names(self) -> list[str]:
        return sorted(self._group)

    def within(self, name: str) -> "Reader":
        group = self._group[name]
        if not isinstance(group, h5py.Group):
            raise ValueError(f"{name} is no group")
        return Reader(group, self._left)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._dataset(name).shape)

    def facts(self) -> dict[str, Any]:
        """The attributes."""
        attributes = self._group.attrs
        if len(attributes) > MOST_FACTS:
            raise ValueError(f"it has {len(attributes)} attributes")
        facts = {}
        for name in attributes:
            identifier = attributes.get_id(name)
            if (
                prod(identifier.shape) > MOST_ENTRIES
                or identifier.get_storage_size() > MOST_TEXT
            ):
                raise ValueError(f"its attribute {name} is too large")
            value = attributes[name]
            if isinstance(value, np.longdouble):  # of which there is no plain number
                raise ValueError(f"its attribute {name} is no number of 64 bits")
            facts[name] = value.item() if isinstance(value, np.generic) else value
            if isinstance(facts[name], str):
                self._text(name, facts[name])
        return facts

    def numbers(
        self, name: str, shape: tuple[int | None, ...], first: int | None = None
    ) -> np.ndarray:
        """An array of this shape (None: any length), or its first entries alone."""
        data = self._dataset(name)
        fits = len(data.shape) == len(shape) and all(
            n in (m, None) for m, n in zip(data.shape, shape, strict=True)
        )
        if not fits:
            raise ValueError(f"{name} has the shape {data.shape}")
        if data.dtype.kind not in "fiu" or data.dtype.itemsize > 8:
            raise ValueError(f"{name} holds no numbers")
        taken = (
            data.shape
            if first is None
            else (min(first, data.shape[0]), *data.shape[1:])
        )
        if first is not None and first > data.shape[0]:
            raise ValueError(f"{name} has {data.shape[0]} of {first} rounds")
        self._spend(name, prod(taken) * data.dtype.itemsize)
        values: np.ndarray = np.asarray(data[()] if first is None else data[:first])
        return values.astype(values.dtype.newbyteorder("="), copy=False)

    def text(self, name: str) -> str:
        data = self._dataset(name)
        if data.shape != ():
            raise ValueError(f"{name} is no single text")
        return self._text(name, data.asstr()[()])

    def texts(self, name: str) -> list[str]:
        """One by one: all of them may be one long string, which the file holds once."""
        data = self._dataset(name)
        if len(data.shape) != 1 or data.shape[0] > MOST_ENTRIES:
            raise ValueError(f"{name} is no list, or too long a one")
        strings = data.asstr()
        return [self._text(name, strings[number]) for number in range(data.shape[0])]

    def _dataset(self, name: str) -> h5py.Dataset:
        data = self._group[name]
        if not isinstance(data, h5py.Dataset) or data.shape is None:
            raise ValueError(f"{name} is no dataset, or an empty one")
        if data.dtype.itemsize > MOST_TEXT or (
            data.chunks and prod(data.chunks) * data.dtype.itemsize > SLACK
        ):
            raise ValueError(f"{name} has entries or chunks that are too large")
        return data

    def _text(self, name: str, text: Any) -> str:
        if not isinstance(text, str) or len(text) > MOST_TEXT:
            raise ValueError(f"{name} is no text, or too long a one")
        self._spend(
            name, len(text.encode())
        )  # refuses halves of characters, which nothing could print
        return text

    def _spend(self, name: str, count: int) -> None:
        if count > self._left[0]:
            raise ValueError(f"{name} declares more than the file holds")
        self._left[0] -= count


@contextmanager
def readable(path: Path, kind: str) -> Iterator[None]:
    """One line for whatever a damaged or hostile file makes libhdf5, h5py and numpy
    raise: it may be anything.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"{path} cannot be read as {kind}: {reason}") from None


def check_file(path: Path, most: int = 2**62) -> int:
    """The size of a plain file; a ValueError for what is none, is larger than `most`,
    or holds nothing but holes.
    """
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise ValueError("it is a link, which is not followed")
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is no plain file")
    if found.st_size > most:
        raise ValueError(
            f"it has {found.st_size:,} bytes, and {most:,} at most are read"
        )
    if found.st_size >= SPARSE[0] and found.st_blocks * 512 * SPARSE[1] < found.st_size:
        raise ValueError("it was never written as a whole")
    return found.st_size


@contextmanager
def reading(path: Path, most: int = MOST_BYTES) -> Iterator[Reader]:
    """A file that is read as a whole."""
    size = path.stat().st_size
    if size > most:
        raise ValueError(f"it has {size:,} bytes, and {most:,} at most are read")
    with h5py.File(path, "r") as file:
        check(file)
        yield Reader(file, [size + SLACK])


def try_out(paths: Iterable[Path]) -> None:
    """Refuses files that libhdf5 cannot bear, before this process reads them. It forks:
    to be called before MPI starts.

    A child reads all that they hold. What is merely wrong with them is left to whoever
    reads them for a purpose.
    """
    for path in paths:
        with readable(path, "HDF5"):
            check_file(path.resolve())
        child = os.fork()
        if not child:
            try:
                _try(path)
            except ValueError:
                os._exit(DAMAGED)
            finally:
                os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if ended < 0:
            reason = (
                "takes too long with it"
                if ended == -signal.SIGXCPU
                else "crashes over it"
            )
            raise UserError(f"{path} is damaged: the HDF5 library {reason}")
        if ended == DAMAGED:
            raise UserError(
                f"{path} is damaged: a heap of strings has an entry without a size"
            )


def _check_heaps(path: Path) -> None:
    """Refuses heaps of strings with an entry of no size, over which libhdf5 2.0.0 never
    gets.
    """
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content,
    ):
        at = content.find(b"GCOL\x01")
        while at >= 0:
            place, end = (
                at + 16,
                min(
                    len(content),
                    at + int.from_bytes(content[at + 8 : at + 16], "little"),
                ),
            )
            while place + 16 <= end:
                number, size = (
                    int.from_bytes(content[place + i : place + j], "little")
                    for i, j in ((0, 2), (8, 16))
                )
                if not number and not size:
                    raise ValueError(place)
                place += size if not number else 16 + size + -size % 8
            at = content.find(b"GCOL\x01", at + 1)


def _try(path: Path) -> None:
    size, page = path.stat().st_size, os.sysconf("SC_PAGE_SIZE")
    _limit(resource.RLIMIT_CPU, PATIENCE + size // SPEED)
    there = int(Path("/proc/self/statm").read_text().split()[0]) * page
    _limit(resource.RLIMIT_AS, there + 3 * size + MEMORY)
    _limit(resource.RLIMIT_CORE, 0)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    if size:
        _check_heaps(path)
    with suppress(Exception), h5py.File(path, "r") as file:
        left = size + SLACK
        for _, item in _objects(file):
            with suppress(Exception):
                opened = (
                    h5py.Group(item)
                    if isinstance(item, h5py.h5g.GroupID)
                    else h5py.Dataset(item)
                )
                dict(opened.attrs)
                if isinstance(
                    opened, h5py.Dataset
                ) and opened.size * opened.dtype.itemsize <= min(SLACK, left):
                    left -= opened.size * opened.dtype.itemsize
                    opened[()]


def _limit(kind: int, most: int) -> None:
    """Below what the system allows, which a process cannot raise."""
    soft, hard = resource.getrlimit(kind)
    set_already = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(kind, (min(most, *set_already) if set_already else most, hard))


def check(file: h5py.File) -> None:
    """Refuses a file that does not stand alone."""
    for _ in _objects(file):
        pass


def _objects(file: h5py.File) -> Iterator[tuple[str, Any]]:
    """All groups and datasets; those with several names, even inside themselves, once."""
    seen: set[int] = set()
    yield "", h5py.h5g.open(file.id, b"/")
    groups = [(file.id, "")]
    for _ in range(MOST_DEPTH):
        below = []
        for group, path in groups:
            for name in group:
                kind = group.links.get_info(name)
                where = f"{path}/{name.decode(errors='replace')}"
                if kind.type == h5py.h5l.TYPE_SOFT:
                    continue  # what it names is in this file, and looked at there
                if kind.type != h5py.h5l.TYPE_HARD:
                    raise ValueError(
                        f"{where} is a link to another file, which is never followed"
                    )
                if kind.u in seen:
                    continue
                seen.add(kind.u)
                if len(seen) > MOST_OBJECTS:
                    raise ValueError(f"it holds more than {MOST_OBJECTS:,} objects")
                item = h5py.h5o.open(group, name)
                if isinstance(item, h5py.h5d.DatasetID):
                    _check_dataset(item, where)
                    yield where, item
                elif isinstance(item, h5py.h5g.GroupID):
                    below.append((item, where))
                    yield where, item
        if not below:
            return
        groups = below
    raise ValueError(f"its groups are nested more than {MOST_DEPTH} deep")


def _check_dataset(data: h5py.h5d.DatasetID, where: str) -> None:
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
        if creation.get_filter(number)[0] != h5py.h5z.FILTER_FLETCHER32:
            raise ValueError(
                f"{where} is packed; hpcfed writes and reads plain numbers with checksums"
            )
