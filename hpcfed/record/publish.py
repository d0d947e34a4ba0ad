"""Putting a file in place so that a reader sees the old one or the new one, never a part."""

import os
import socket
from pathlib import Path


def publish(content: bytes | memoryview, path: Path) -> None:
    """Writes beside the path, syncs, renames over it, and syncs the folder.

    A process that is killed on its way leaves what it wrote beside it under a hidden name; the next one removes it.
    """
    mine = f".{path.name}.{socket.gethostname()}."
    temporary = path.with_name(f"{mine}{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _remove_leftovers(path.parent, mine)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _remove_leftovers(folder: Path, beginning: str) -> None:
    """Of processes of this host that are no more: another that is alive may be about to rename its own."""
    for name in os.listdir(folder):
        process = name.removeprefix(beginning).removesuffix(".tmp")
        if name == f"{beginning}{process}.tmp" and process.isdecimal() and not Path("/proc", process).exists():
            (folder / name).unlink(missing_ok=True)
