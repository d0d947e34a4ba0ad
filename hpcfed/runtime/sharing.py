"""Arrays that the ranks of a host hold once, in shared memory."""

import mmap
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from hpcfed.runtime import mpi
from hpcfed.runtime.world import World

Arrays = dict[str, np.ndarray]
ALIGNMENT = 64
"""Bytes: every array begins at a multiple of this, a cache line."""
TOKEN_BYTES = 16


@dataclass(frozen=True)
class Place:
    """Where a rank has put arrays for the other ranks of its host."""

    process: int
    file: int
    """The file descriptor in that process."""
    token: bytes
    """The file begins with it: another container may have the same process id."""
    size: int
    arrays: dict[str, tuple[tuple[int, ...], str, int]]
    """Shape, type and offset of each array, by name."""


def once_per_host(world: World, make: Callable[[], Arrays]) -> Arrays:
    """Return the arrays that `make` returns; one rank of the role on each host makes
    them for all. The same call on every rank of the role.

    A rank that cannot reach them makes its own. Its changes to them are private.
    """
    host = mpi.on_this_host(world.role_comm)
    if host is None or host.Get_size() == 1:
        return make()
    place = None
    if host.Get_rank() == 0:
        try:
            arrays = make()
            with suppress(OSError):
                place, arrays = put(arrays)
        finally:
            # Also after a failure: the others must not wait, and find it themselves.
            host.bcast(place, root=0)
    else:
        place = host.bcast(None, root=0)
        found = None if place is None else attach(place)
        arrays = make() if found is None else found
    # The descriptor must stay open until the last rank has mapped it.
    host.Barrier()
    if host.Get_rank() == 0 and place is not None:
        # All have opened it now. The memory is freed with the last of them.
        os.close(place.file)
    return arrays


def put(arrays: Arrays) -> tuple[Place, Arrays]:
    """Put arrays where other processes find them; return their place and the arrays."""
    offset = TOKEN_BYTES
    placed = {}
    for name, array in arrays.items():
        offset = -(-offset // ALIGNMENT) * ALIGNMENT
        placed[name] = (array.shape, array.dtype.str, offset)
        offset += array.nbytes
    # Memory without a name in any file system: a crash leaves nothing behind.
    file = os.memfd_create("hpcfed")
    try:
        # Allocate now: a page that is missing later would end the process.
        os.posix_fallocate(file, 0, offset)
        memory = mmap.mmap(file, offset)
        token = secrets.token_bytes(TOKEN_BYTES)
        memory[:TOKEN_BYTES] = token
        for name, view in _views(memory, placed).items():
            view[...] = arrays[name]
        place = Place(os.getpid(), file, token, offset, placed)
        return place, _mapped(file, place)
    except BaseException:
        os.close(file)
        raise


def attach(place: Place) -> Arrays | None:
    """Return arrays that another process shares; None if out of reach."""
    try:
        # The memory has no name, but Linux lists a process's open files.
        file = os.open(f"/proc/{place.process}/fd/{place.file}", os.O_RDONLY)
    except OSError:
        return None
    try:
        if os.pread(file, TOKEN_BYTES, 0) != place.token:
            return None
        return _mapped(file, place)
    except (OSError, ValueError):
        return None
    finally:
        os.close(file)


def _mapped(file: int, place: Place) -> Arrays:
    """Return the arrays of an open file; a page is copied when written to."""
    memory = mmap.mmap(file, place.size, access=mmap.ACCESS_COPY)
    return _views(memory, place.arrays)


def _views(
    memory: mmap.mmap, placed: dict[str, tuple[tuple[int, ...], str, int]]
) -> Arrays:
    views = {}
    for name, (shape, kind, offset) in placed.items():
        views[name] = np.ndarray(shape, kind, buffer=memory, offset=offset)
    return views
