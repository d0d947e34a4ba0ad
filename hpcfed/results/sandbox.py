"""Reading HDF5 files in a child process first, before this process reads them.

libhdf5 may crash or never return on a damaged file (2.0.0 loops on a global heap with
zeros in it). A child process with limits finds out safely.
"""

import hashlib
import mmap
import os
import resource
import signal
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import h5py

from hpcfed.errors import UserError
from hpcfed.results.safe import SLACK, check_file, objects, readable

PATIENCE, SPEED = 5, 4 * 2**20
"""CPU seconds that trying a file may take, and bytes that add one more second."""
DAMAGED = 3
"""Exit code of a child that found a heap on which libhdf5 would loop forever."""
MEMORY = 2**30
"""Bytes of memory that trying a file may take beyond three times its size."""
MOST_HASHED = 64 * 2**20
"""Largest file whose checksum is quicker to compute than a child is to start."""
_sound: dict[Path, bytes] = {}
"""Checksums of files that this process has tried, or written itself."""
BAD_HEAP = "a heap of strings has an entry without a size"
_HEAP = b"GCOL\x01"
"""The first bytes of a heap of strings: its signature and version."""
_ENTRY = struct.Struct("<H6xQ")
"""The header of an entry in a heap: its number and its size, among others."""


def try_out(paths: Iterable[Path]) -> None:
    """Refuse files that make libhdf5 crash or hang, before this process reads them.

    A child reads everything in them. Other errors are left to the actual reader. This
    forks, so call it before MPI starts. What this process has tried before, or written,
    is not tried again.
    """
    for path in paths:
        with readable(path, "HDF5"):
            file = path.resolve()
            found = _checksum(file) if check_file(file) <= MOST_HASHED else b""
        if found and _sound.get(file) == found:
            continue
        ended = _in_child(path)
        if ended < 0:
            reason = "crashes over it"
            if ended == -signal.SIGXCPU:
                reason = "takes too long with it"
            raise UserError(f"{path} is damaged: the HDF5 library {reason}")
        if ended == DAMAGED:
            raise UserError(f"{path} is damaged: {BAD_HEAP}")
        _sound[file] = found


def note_written(path: Path, content: bytes | memoryview) -> None:
    """Remember that libhdf5 has written this content in this process: a child would take
    as long as a fork of all that the process holds.
    """
    if len(content) <= MOST_HASHED:
        _sound[path.resolve()] = hashlib.sha256(content).digest()


def _checksum(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _in_child(path: Path) -> int:
    """Read a file in a child; return its exit code, or minus the signal's number."""
    # A fork, not a new process: nothing has to be imported again, so it takes
    # milliseconds.
    child = os.fork()
    if not child:
        # Whatever happens here, the child must never return into the program.
        try:
            _limit_process(path)
            _read_everything(path)
        except ValueError:
            os._exit(DAMAGED)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _limit_process(path: Path) -> None:
    """Limit this process's time and memory by the file's size, and silence it."""
    size = path.stat().st_size
    _limit(resource.RLIMIT_CPU, PATIENCE + size // SPEED)
    # The limit includes what this process has already mapped.
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    mapped = pages * os.sysconf("SC_PAGE_SIZE")
    _limit(resource.RLIMIT_AS, mapped + 3 * size + MEMORY)
    # A crash is expected here, so write no core file and nothing to the terminal.
    _limit(resource.RLIMIT_CORE, 0)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)


def _limit(kind: int, most: int) -> None:
    """Lower a limit of this process, if it is higher; a process cannot raise one."""
    soft, hard = resource.getrlimit(kind)
    for limit in (soft, hard):
        if limit != resource.RLIM_INFINITY:
            most = min(most, limit)
    # Only the soft limit: SIGXCPU then ends the child, and tells why.
    resource.setrlimit(kind, (most, hard))


def _read_everything(path: Path) -> None:
    """Read all attributes and numbers of a file; a ValueError only for a bad heap."""
    size = path.stat().st_size
    if size:
        check_heaps(path)
    # Other errors are suppressed: only a crash or an endless loop counts.
    left = size + SLACK
    with suppress(Exception), h5py.File(path, "r") as file:
        for _, item in objects(file):
            if item is None:
                continue
            with suppress(Exception):
                is_group = isinstance(item, h5py.h5g.GroupID)
                opened = h5py.Group(item) if is_group else h5py.Dataset(item)
                dict(opened.attrs)
                if is_group:
                    continue
                declared = opened.size * opened.dtype.itemsize
                if declared <= min(SLACK, left):
                    left -= declared
                    opened[()]


def check_heaps(path: Path) -> None:
    """Raise a ValueError for heaps of strings with an empty entry: libhdf5 2.0.0 loops
    on them.
    """
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content,
    ):
        at = content.find(_HEAP)
        while at >= 0:
            _check_heap(content, at)
            at = content.find(_HEAP, at + 1)


def _check_heap(content: mmap.mmap, start: int) -> None:
    """Walk the entries of one heap; see "Global Heap" in the HDF5 file format."""
    size = int.from_bytes(content[start + 8 : start + 16], "little")
    end = min(len(content), start + size)
    entry = start + 16
    while entry + 16 <= end:
        index, size = _ENTRY.unpack_from(content, entry)
        if not index and not size:
            raise ValueError(BAD_HEAP)
        # Entry 0 is free space, whose size includes its header; others are padded to 8.
        entry += size if not index else 16 + size + -size % 8
