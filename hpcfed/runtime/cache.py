"""The user's cache for what takes seconds to make and stays the same, such as compiled
kernels.

Every entry can be made again. So any problem with the cache (no home, a full disk, a
damaged file, a file of another user) costs those seconds and nothing else. Many ranks
may read and write at once: an entry appears whole, by rename.
"""

import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

VARIABLE = "HPCFED_CACHE"
"""The environment variable that names another folder; `off`: keep nothing."""
MOST_BYTES = 512 * 2**20
"""The most bytes in the folder; beyond that the oldest entries are removed."""
DIGEST_BYTES = 32


def folder() -> Path | None:
    """Return the cache's folder; None if the user wants none, or has no home."""
    wanted = os.environ.get(VARIABLE)
    if wanted:
        return None if wanted == "off" else Path(wanted).absolute()
    home = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG standard says to ignore a relative path.
    if os.path.isabs(home):
        return Path(home) / "hpcfed"
    try:
        return Path.home() / ".cache" / "hpcfed"
    except RuntimeError:
        return None


def bytecode_folder() -> Path | None:
    """Return the folder within the cache in which Python keeps compiled modules; None
    unless it belongs to this user and no other user can write to it.
    """
    path, name = folder(), "bytecode"
    try:
        with _opened(make=True) as where:
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=where)
            status = os.stat(name, dir_fd=where, follow_symlinks=False)
    except OSError:
        return None
    ours = stat.S_ISDIR(status.st_mode) and _only_ours(status)
    return path / name if ours and path is not None else None


def read(name: str) -> bytes | None:
    """Return an entry; None unless it exists, is whole, and belongs to this user."""
    try:
        with _opened() as where:
            # Do not follow a link, and do not wait for the writer of a pipe.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            with open(os.open(name, flags, dir_fd=where), "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode) or not _only_ours(status):
                    return None
                sealed = file.read()
    except OSError:
        return None
    digest, content = sealed[:DIGEST_BYTES], sealed[DIGEST_BYTES:]
    return content if digest == _digest(name, content) else None


def write(name: str, content: bytes) -> None:
    """Keep an entry, if possible; replace an older one of this name."""
    with suppress(OSError), _opened(make=True) as where:
        # Unguessable and exclusive, so that no other process can have prepared the
        # file.
        temporary = f"{name}.{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            with open(os.open(temporary, flags, 0o600, dir_fd=where), "wb") as file:
                file.write(_digest(name, content) + content)
            os.rename(temporary, name, src_dir_fd=where, dst_dir_fd=where)
        except OSError:
            os.unlink(temporary, dir_fd=where)
            raise
        _prune(where)


@contextmanager
def _opened(*, make: bool = False) -> Iterator[int]:
    """Open the folder, which must be this user's and writable by no other."""
    path = folder()
    if path is None:
        raise FileNotFoundError("there is no cache")
    if make and not path.is_dir():
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A new folder may be writable by a group by default. An existing one may be
        # shared on purpose, and is left alone.
        path.chmod(0o700)
    where = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not _only_ours(os.fstat(where)):
            raise PermissionError(f"{path}: others can write there")
        # Entries are found through the open folder, even if its path changes.
        yield where
    finally:
        os.close(where)


def _only_ours(status: os.stat_result) -> bool:
    """Tell whether a file or folder is this user's, and no other user may change it."""
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return status.st_uid == os.geteuid() and not others


def _digest(name: str, content: bytes) -> bytes:
    """Return a checksum that also detects an entry stored under another name."""
    return hashlib.sha256(name.encode() + b"\0" + content).digest()


def _prune(where: int) -> None:
    """Remove the oldest entries when there are too many, down to half the limit."""
    entries = []
    for name in os.listdir(where):
        with suppress(OSError):
            status = os.stat(name, dir_fd=where, follow_symlinks=False)
            entries.append((status.st_mtime, status.st_size, name))
    total = sum(size for _, size, _ in entries)
    if total <= MOST_BYTES:
        return
    # By time of writing: the oldest first.
    for _, size, name in sorted(entries):
        if total <= MOST_BYTES // 2:
            return
        with suppress(OSError):
            os.unlink(name, dir_fd=where)
            total -= size
