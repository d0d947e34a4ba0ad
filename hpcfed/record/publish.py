"""Putting a file in place so that a reader sees the old one or the new one, never a
part.
"""

import os
import socket
import stat
from pathlib import Path

from hpcfed.errors import UserError

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
"""What may be at a path that is no regular file."""


def check_target(option: str, path: Path) -> None:
    """Refuses an output path where something other than a regular file is.

    A rename would put a file in its place: nobody wants /dev/null or a link to be lost
    by that.
    """
    try:
        kind = stat.S_IFMT(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return  # a parent that is no folder is told when the file is written
    except OSError as error:
        raise UserError(f"cannot write {option} {path}: {error.strerror}") from None
    if kind != stat.S_IFREG:
        raise UserError(
            f"{option} {path} is {KINDS.get(kind, 'no regular file')}; name a regular "
            "file, or a new one"
        )


def name_file(error: BaseException, path: Path) -> None:
    """Adds the file to an error of the system that names none."""
    if isinstance(error, OSError) and error.filename is None:
        error.filename = str(path)


def publish(content: bytes | memoryview, path: Path) -> None:
    """Writes beside the path, syncs, renames over it, and syncs the folder.

    A process that is killed on its way leaves what it wrote beside it under a hidden
    name; the next one removes it.
    """
    mine = f".{path.name}.{socket.gethostname()}."
    temporary = path.with_name(f"{mine}{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        name_file(error, path)
        raise
    _remove_leftovers(path.parent, mine)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _remove_leftovers(folder: Path, beginning: str) -> None:
    """Of processes of this host that are no more: another that is alive may be about to
    rename its own.
    """
    for name in os.listdir(folder):
        process = name.removeprefix(beginning).removesuffix(".tmp")
        if (
            name == f"{beginning}{process}.tmp"
            and process.isdecimal()
            and not Path("/proc", process).exists()
        ):
            (folder / name).unlink(missing_ok=True)
