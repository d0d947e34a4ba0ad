"""Writing files so that a reader sees the old one or the new one, never a torn one; and
writing HDF5 files in place.
"""

import errno
import os
import re
import resource
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from hpcfed.errors import UserError

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
"""What a path may be if it is not a regular file."""
BENCHMARK = re.compile(rb'\s*\{\s*"format":\s*"hpcfed (benchmark|turns)"')
"""How the result of a benchmark begins."""
FORMAT_BYTES = 100


def check_target(option: str, path: Path) -> None:
    """Refuse a path that is not a regular file: a rename would replace a device."""
    try:
        kind = stat.S_IFMT(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        # A parent that is not a folder is reported when the file is written.
        return
    except OSError as error:
        raise UserError(f"cannot write {option} {path}: {error.strerror}") from None
    if kind != stat.S_IFREG:
        found = KINDS.get(kind, "not a regular file")
        raise UserError(
            f"{option} {path} is {found}; name a regular file, or a new one"
        )


def check_folder(option: str, folder: Path) -> None:
    """Refuse a folder that cannot be made, since it or one above it is a file, or a link
    that leads nowhere.
    """
    for path in (folder, *folder.parents):
        if path.is_dir():
            return
        where = "" if path == folder else f": {path}"
        if path.exists():
            raise UserError(f"{option} {folder}{where} is a file; name a folder")
        if path.is_symlink():
            raise UserError(
                f"{option} {folder}{where} is a link to {os.readlink(path)}, which does "
                "not exist; make that folder, or name another"
            )


def check_no_result(option: str, path: Path) -> None:
    """Refuse to replace the result of a benchmark: it cannot be computed again."""
    # Its format is the first thing in the file.
    with suppress(OSError), open(path, "rb") as file:
        if BENCHMARK.match(file.read(FORMAT_BYTES)):
            raise UserError(
                f"{option} {path} is a benchmark's result, which would be lost; name "
                "another place"
            )


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces the path at the end, once it is whole and on disk.

    It is written beside the path under a hidden name, synced, and renamed. If the block
    raises, the path stays as it was. The rename itself is on disk only once the folder
    is synced; the caller does that if it matters.
    """
    temporary = path.with_name(f"{_hidden(path)}{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            # Without the sync, a machine crash may leave an empty file under the new
            # name.
            file.flush()
            os.fsync(file.fileno())
        # Atomic on POSIX: a reader opens the old file or the new one.
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        # For a full disk, the system's error does not name the file.
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise


def publish(content: bytes | memoryview, path: Path) -> None:
    """Replace a file by this content, durably.

    A process killed in between leaves its hidden file behind; the next one to publish
    removes it.
    """
    with replacing(path) as file:
        file.write(content)
    _remove_leftovers(path)
    sync_folder(path.parent)


def export(content: bytes, path: Path) -> None:
    """Publish a file for the user, in a folder that may not exist yet."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        publish(content, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def replace_quickly(content: str, path: Path) -> None:
    """Replace a whole file without waiting for the disk; a crash may lose it."""
    hidden = path.with_name(f"{_hidden(path)}{os.getpid()}.tmp")
    with suppress(OSError):
        write_plain(content, hidden)
        os.replace(hidden, path)


def write_plain(content: str, path: Path) -> None:
    """Write a file, but do not follow a link or wait for a pipe under its name."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
    with open(os.open(path, flags, 0o666), "w") as file:
        file.write(content)


def make_durably(folder: Path) -> None:
    """Make a folder and its parents, durably; it may be there already."""
    if not folder.parent.exists():
        make_durably(folder.parent)
    folder.mkdir(exist_ok=True)
    # Also if it was there: whoever made it may have been killed before this line. A
    # parent that we may not read is somebody else's, and older.
    with suppress(PermissionError):
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hidden(path: Path) -> str:
    """Return the prefix of hidden names under which this host writes a path."""
    return f".{path.name}.{socket.gethostname()}."


def _remove_leftovers(path: Path) -> None:
    """Remove hidden files that dead processes of this host have left."""
    beginning = _hidden(path)
    for name in os.listdir(path.parent):
        process = name.removeprefix(beginning).removesuffix(".tmp")
        if name != f"{beginning}{process}.tmp" or not process.isdecimal():
            continue
        # Only this host's names carry its host name, so the process id means something
        # here.
        if not Path("/proc", process).exists():
            (path.parent / name).unlink(missing_ok=True)


def check_limit(path: Path, size: int) -> None:
    """Refuse a file that would exceed `ulimit -f`."""
    # libhdf5 2.0.0 crashes if a write fails for this reason, so check first.
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit == resource.RLIM_INFINITY or size <= limit:
        return
    error = OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    error.add_note(f"{size:,} bytes, and ulimit -f allows {limit:,}")
    raise error


@contextmanager
def replacing_hdf5(path: Path, size: int) -> Iterator[Path]:
    """Yield where to write an HDF5 file of about this size. It replaces the path at the
    end, durably, once it is whole; if the block raises, the path stays as it was.
    """
    check_limit(path, size)
    temporary = path.with_name(f"{_hidden(path)}{os.getpid()}.tmp")
    # h5py would follow a symbolic link of that name.
    temporary.unlink(missing_ok=True)
    try:
        with hdf5_writing(path):
            yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _remove_leftovers(path)
    sync_folder(path.parent)


@contextmanager
def hdf5_writing(path: Path) -> Iterator[None]:
    """Turn libhdf5's several lines about a failed write into the system's own error."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        # h5py raises any of these three, with the errno inside the text.
        found = re.search(r"errno = (\d+)", str(error))
        if found is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(path)) from None
