"""Putting a file in place so that a reader sees the old one or the new one, never a part."""

import os
from pathlib import Path


def publish(content: bytes | memoryview, path: Path) -> None:
    """Writes beside the path, syncs, renames over it, and syncs the folder."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
