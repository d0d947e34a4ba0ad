"""A simulated disk: a real folder, and what of it would outlast a power cut.

Files are real ones in a folder of the memory. Beside them stands what is durable: the
content of a file at its last fsync, and the names of a folder at its last fsync. After
a power cut, each change of names since then is there or not, and a file that was not
synced is torn. Locks and refusals (full, read-only, failing, slow) are simulated.
"""

import errno
import os
import random
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAGE = 4096
MANNERS = ("ordered", "any", "any", "none", "all")
"""The first of them, any of them, none or all; any of them twice as often."""
SYNC, SLOW_SYNC = 0.004, 5.0
"""Mean simulated seconds of a sync on a sound disk, and on a slow one."""


@dataclass(eq=False)
class File:
    """A file, whatever names it has."""

    synced: bytes | None = None
    """Its content at the last sync; None: never."""
    last: bytes | None = None
    """Its content when it lost its name; None while it has one."""


@dataclass(eq=False)
class Folder:
    """The names in a folder."""

    names: dict[str, "File | Folder"] = field(default_factory=dict)
    durable: dict[str, "File | Folder"] = field(default_factory=dict)
    changes: list[dict[str, "File | Folder | None"]] = field(default_factory=list)
    """What has happened since the last sync, in order."""

    def apply(self, change: dict[str, "File | Folder | None"]) -> None:
        _apply(self.names, change)
        self.changes.append(change)


Node = File | Folder


@dataclass(eq=False)
class Opened:
    """What is behind a descriptor, and those that were copied from it."""

    path: str
    node: Node | None


def _apply(names: dict[str, Node], change: dict[str, Node | None]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


class Disk:
    """The disk of a cluster, in a real folder."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.realpath(root))
        self._prefix = f"{self.root}/"
        self.top = Folder()
        self.refuses: dict[str, int] = {}
        """By kind of refusal (`read`, `write`, `change`, `sync`), the error number."""
        self.room: int | None = None
        """Bytes that can still be written; None: enough."""
        self.slow = False
        self.note: Callable[[str], None] = lambda what: None
        self._locks: dict[File, dict[Opened, bool]] = {}
        """By file: who holds its lock, and whether alone."""
        self._open: dict[int, tuple[Any, Opened]] = {}
        """By descriptor: its process, and what is behind it."""

    # Where things are.

    def path(self, path: Any, dir_fd: int | None = None) -> str | None:
        """Return a path on this disk as text; None for any other."""
        if isinstance(path, int):
            if path not in self._open:
                path = os.readlink(f"/proc/self/fd/{path}")
                return path if path.startswith(self._prefix) else None
            return self._open[path][1].path
        text = os.fspath(path)
        if isinstance(text, bytes):
            return None
        if dir_fd is not None:
            folder = self.path(dir_fd)
            return None if folder is None else f"{folder}/{text}"
        if not text.startswith("/"):
            text = os.path.abspath(text)
        return text if text.startswith(self._prefix) or text == str(self.root) else None

    def node(self, path: str) -> Node | None:
        """Return what is at a path."""
        found: Node = self.top
        for name in path[len(self._prefix) :].split("/"):
            if not name:
                continue
            if not isinstance(found, Folder) or name not in found.names:
                return None
            found = found.names[name]
        return found

    def _parent(self, path: str) -> tuple[Folder, str]:
        parent, _, name = path.rpartition("/")
        folder = self.node(parent)
        if not isinstance(folder, Folder):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return folder, name

    # What happens. Each is called around the real operation.

    def check(self, kind: str, path: str) -> None:
        """Refuse what the disk refuses now."""
        number = self.refuses.get(kind)
        if number is not None:
            self.note(f"refused {kind} {self._short(path)}")
            raise OSError(number, os.strerror(number), path)

    def written(self, path: str, content: bytes | memoryview) -> int:
        """Return how many of these bytes fit; refuse none at all."""
        self.check("write", path)
        size = len(content)
        if self.room is not None:
            if self.room <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            size = min(size, self.room)
            self.room -= size
        return size

    def created(self, path: str) -> File:
        """Note that a file was opened for writing; it may be there already."""
        folder, name = self._parent(path)
        there = folder.names.get(name)
        if isinstance(there, File):
            return there
        made = File()
        folder.apply({name: made})
        self.note(f"create {self._short(path)}")
        return made

    def made_folder(self, path: str) -> None:
        folder, name = self._parent(path)
        folder.apply({name: Folder()})
        self.note(f"mkdir {self._short(path)}")

    def before_removal(self, path: str) -> None:
        """Keep the content of a file that is about to lose its name."""
        there = self.node(path)
        if isinstance(there, File) and there.last is None:
            with open(path, "rb") as file:
                there.last = file.read()

    def removed(self, path: str) -> None:
        folder, name = self._parent(path)
        folder.apply({name: None})
        self.note(f"remove {self._short(path)}")

    def renamed(self, source: str, target: str) -> None:
        folder, name = self._parent(source)
        other, new = self._parent(target)
        moved = folder.names.get(name)
        if moved is None:
            moved = File()
        if folder is other:
            folder.apply({name: None, new: moved})
        else:
            folder.apply({name: None})
            other.apply({new: moved})
        content = b""
        if isinstance(moved, File):
            content = Path(target).read_bytes()
        self.note(
            f"rename {self._short(source)} {self._short(target)} {zlib.crc32(content):08x}"
        )

    def synced(self, path: str) -> None:
        """Note that a file's content, or a folder's names, are durable."""
        there = self.node(path)
        if isinstance(there, Folder):
            for change in there.changes:
                _apply(there.durable, change)
            there.changes.clear()
        elif isinstance(there, File):
            with open(path, "rb") as file:
                there.synced = file.read()
        self.note(f"sync {self._short(path)}")

    def sync_seconds(self, chance: random.Random) -> float:
        return chance.expovariate(1 / (SLOW_SYNC if self.slow else SYNC))

    def _short(self, path: str) -> str:
        return path[len(self._prefix) :]

    # Descriptors and locks.

    def opened(self, descriptor: int, path: str, owner: Any) -> None:
        self._open[descriptor] = owner, Opened(path, self.node(path))

    def copied(self, descriptor: int, copy: int, owner: Any) -> None:
        """Note that another process has a copy of a descriptor."""
        if descriptor in self._open:
            self._open[copy] = owner, self._open[descriptor][1]

    def closed(self, descriptor: int) -> None:
        """Note that a descriptor is closed; the last one drops the lock."""
        _, behind = self._open.pop(descriptor, (None, None))
        if behind is None or any(other is behind for _, other in self._open.values()):
            return
        for holders in self._locks.values():
            holders.pop(behind, None)

    def forget(self, owner: Any) -> list[int]:
        """Close what a dead process had open; return the descriptors."""
        left = [number for number, (theirs, _) in self._open.items() if theirs is owner]
        for descriptor in left:
            self.closed(descriptor)
        return left

    def lock(self, descriptor: int, *, alone: bool) -> bool:
        """Lock a file, and tell whether that was possible."""
        _, behind = self._open.get(descriptor, (None, None))
        if behind is None or not isinstance(behind.node, File):
            return True
        holders = self._locks.setdefault(behind.node, {})
        others = [mode for other, mode in holders.items() if other is not behind]
        if any(others) or (alone and others):
            return False
        holders[behind] = alone
        return True

    # Power cuts.

    def cut(self, chance: random.Random, manner: str | None = None) -> list[str]:
        """Lose what a power cut loses; return the files that are torn.

        `manner`: which changes of names since their folder's last sync are there; one
        of `MANNERS`.
        """
        torn: list[str] = []
        manner = manner or chance.choice(MANNERS)
        after = self._surviving(self.top, chance, manner, torn, str(self.root))
        for path in self.root.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        self.top = Folder()
        _restore(self.top, self.root, after)
        self._locks.clear()
        self.note(f"power cut, {manner}, torn: {' '.join(torn)}")
        return torn

    def _surviving(
        self,
        folder: Folder,
        chance: random.Random,
        manner: str,
        torn: list[str],
        path: str,
    ) -> dict[str, Any]:
        names = dict(folder.durable)
        many = len(folder.changes)
        first = chance.randint(0, many)
        for number, change in enumerate(folder.changes):
            stays = {
                "all": True,
                "none": False,
                "ordered": number < first,
                "any": chance.random() < 0.5,
            }[manner]
            if stays:
                _apply(names, change)
        found: dict[str, Any] = {}
        for name, node in names.items():
            below = f"{path}/{name}"
            if isinstance(node, Folder):
                found[name] = self._surviving(node, chance, manner, torn, below)
            else:
                found[name] = self._content(node, chance, torn, below)
        return found

    def _content(
        self, file: File, chance: random.Random, torn: list[str], path: str
    ) -> bytes:
        content = file.last
        if content is None:
            with open(self._where(file, path), "rb") as real:
                content = real.read()
        if file.synced == content or not content:
            return content
        manner = chance.choice(("old", "new", "cut", "zeros"))
        if manner == "new":
            return content
        if manner == "old":
            return file.synced or b""
        torn.append(self._short(path))
        if manner == "cut":
            return content[: chance.randrange(len(content))]
        pages = bytearray(content)
        for start in range(0, len(pages), PAGE):
            if chance.random() < 0.5:
                size = len(pages[start : start + PAGE])
                pages[start : start + PAGE] = bytes(size)
        return bytes(pages)

    def _where(self, file: File, path: str) -> str:
        """Return where a file with a name is now; it may have had another."""
        if self.node(path) is file:
            return path
        found = _find(self.top, file, str(self.root))
        assert found is not None
        return found

    def put(self, path: str, content: bytes) -> None:
        """Note a file that somebody else has written, durably."""
        folder, name = self._parent(path)
        folder.names[name] = folder.durable[name] = File(synced=content)


def _find(folder: Folder, wanted: File, path: str) -> str | None:
    """Return the path of a file, under whatever name it is now."""
    for name, node in folder.names.items():
        below = f"{path}/{name}"
        if node is wanted:
            return below
        if isinstance(node, Folder):
            found = _find(node, wanted, below)
            if found is not None:
                return found
    return None


def _restore(folder: Folder, path: Path, found: dict[str, Any]) -> None:
    """Write what has outlasted a power cut."""
    for name, content in found.items():
        below = path / name
        node: Node
        if isinstance(content, dict):
            below.mkdir()
            node = Folder()
            _restore(node, below, content)
        else:
            below.write_bytes(content)
            node = File(synced=content)
        folder.names[name] = folder.durable[name] = node
