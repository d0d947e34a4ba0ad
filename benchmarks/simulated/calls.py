"""What hpcfed's calls of the system do in simulated threads: files, locks, time, names
of processes. In all other threads they are the system's own.
"""

import builtins
import errno
import fcntl
import io
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.simulated.disk import Disk
from benchmarks.simulated.processes import Cluster, Process
from benchmarks.simulated.scheduler import Scheduler, Task

STDERR = 2
WRITING = os.O_WRONLY | os.O_RDWR
CALL = 2e-4
"""Mean simulated seconds of a call that changes the disk."""
_PROCESS = re.compile(r"/proc/(\d+)$")


class Calls:
    """The system as simulated threads see it."""

    def __init__(self) -> None:
        self.cluster: Cluster | None = None
        self._real = {
            name: getattr(os, name)
            for name in (
                "open", "close", "fsync", "replace", "rename", "unlink", "remove",
                "mkdir", "rmdir", "stat", "getpid", "_exit", "getloadavg", "killpg",
                "write",
            )
        }  # fmt: skip
        self._open = io.open
        self._flock = fcntl.flock
        self.objects: set[int] = set()
        """Descriptors that objects of Python close."""
        self._process: Process | None = None
        self._outside = (sys.stderr, sys.stdout, sys.argv, os.environ._data)  # type: ignore[attr-defined]

    # Who calls.

    @property
    def scheduler(self) -> Scheduler:
        assert self.cluster is not None
        return self.cluster.scheduler

    @property
    def disk(self) -> Disk:
        assert self.cluster is not None
        return self.cluster.disk

    def task(self) -> Task | None:
        """Return the simulated thread that calls; None for any other."""
        if self.cluster is None:
            return None
        task = self.cluster.scheduler.current
        if task is None or task.thread.ident != threading.get_ident():
            return None
        if task.killed:
            self.cluster.scheduler.check_alive()
        return task

    def process(self) -> Process:
        """Return the simulated process that calls."""
        task = self.task()
        assert task is not None
        found: Process = task.owner
        return found

    def resumed(self, task: Task) -> None:
        """Give a thread its process's variables and streams, and its signals."""
        process: Process = task.owner
        if process is not self._process:
            self._process = process
            sys.stderr = sys.stdout = process.stderr
            sys.argv = ["hpcfed", *process.job.words]
            os.environ._data = process.environment  # type: ignore[attr-defined]
        if process.pending and task is process.main:
            process.handle()

    def outside(self) -> None:
        """Give this thread the real process's variables and streams again."""
        self._process = None
        sys.stderr, sys.stdout, sys.argv, os.environ._data = self._outside  # type: ignore[attr-defined]

    # Files.

    def _change(self, kind: str, path: str) -> None:
        """Let time pass before a change of the disk, which may be refused."""
        self.scheduler.spend(self.scheduler.chance.expovariate(1 / CALL))
        self.disk.check(kind, path)

    def os_open(
        self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> int:
        task = self.task()
        here = None if task is None else self.disk.path(path, dir_fd)
        if here is None:
            return int(self._real["open"](path, flags, mode, dir_fd=dir_fd))
        if flags & os.O_CREAT and not os.path.lexists(here):
            self._change("change", here)
        elif flags & WRITING:
            self._change("write", here)
        descriptor = int(self._real["open"](path, flags, mode, dir_fd=dir_fd))
        if flags & os.O_CREAT:
            self.disk.created(here)
        self.disk.opened(descriptor, here, self.process())
        return descriptor

    def os_close(self, descriptor: int) -> None:
        if self.task() is not None:
            self.disk.closed(descriptor)
        self._real["close"](descriptor)

    def os_write(self, descriptor: int, content: Any) -> int:
        """Write to a file, or to the stderr of the process that calls."""
        if descriptor != STDERR or self.task() is None:
            return int(self._real["write"](descriptor, content))
        return self.process().stderr.write(bytes(content).decode())

    def close_left(self, descriptor: int) -> None:
        """Close a dead process's descriptor, unless an object of Python will."""
        if descriptor not in self.objects:
            self._real["close"](descriptor)

    def hand_down(self, descriptor: int, processes: list[Process]) -> None:
        """Give copies of a descriptor to the children of the process that calls."""
        for process in processes:
            process.log = os.dup(descriptor)
            self.disk.copied(descriptor, process.log, process)

    def fsync(self, descriptor: int) -> None:
        task = self.task()
        path = None if task is None else self.disk.path(descriptor)
        if path is None:
            self._real["fsync"](descriptor)
            return
        self.scheduler.spend(self.disk.sync_seconds(self.scheduler.chance))
        self.disk.check("sync", path)
        self.disk.synced(path)

    def replace(self, source: Any, target: Any, **more: Any) -> None:
        task = self.task()
        here = None if task is None else self.disk.path(source)
        there = None if task is None else self.disk.path(target)
        if here is None or there is None:
            self._real["replace"](source, target, **more)
            return
        self._change("change", there)
        self.disk.before_removal(there)
        self._real["replace"](source, target)
        self.disk.renamed(here, there)
        assert self.cluster is not None
        self.cluster.on_rename(self.process(), there)

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        task = self.task()
        here = None if task is None else self.disk.path(path, dir_fd)
        if here is None:
            self._real["unlink"](path, dir_fd=dir_fd)
            return
        self._change("change", here)
        if os.path.lexists(here):
            self.disk.before_removal(here)
        self._real["unlink"](path, dir_fd=dir_fd)
        self.disk.removed(here)

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        task = self.task()
        here = None if task is None else self.disk.path(path, dir_fd)
        if here is not None and not os.path.lexists(here):
            self._change("change", here)
        self._real["mkdir"](path, mode, dir_fd=dir_fd)
        if here is not None:
            self.disk.made_folder(here)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        task = self.task()
        here = None if task is None else self.disk.path(path, dir_fd)
        if here is not None:
            self._change("change", here)
        self._real["rmdir"](path, dir_fd=dir_fd)
        if here is not None:
            self.disk.removed(here)

    def open(
        self, file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **more: Any
    ) -> Any:
        task = self.task()
        writes = any(letter in mode for letter in "wax+")
        here = None
        if task is not None and (writes or self.disk.refuses or isinstance(file, int)):
            here = self.disk.path(file)
        if here is not None and not writes:
            self.disk.check("read", here)
        if here is None or not writes:
            return self._open(file, mode, buffering, *rest, **more)
        if not isinstance(file, int):
            fresh = not os.path.lexists(here)
            self._change("change" if fresh else "write", here)
        raw = _Written(self, here, file, mode.replace("b", "").replace("t", ""))
        if not isinstance(file, int):
            self.disk.created(here)
            self.disk.opened(raw.fileno(), here, self.process())
        buffered = io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *rest, **more)

    def write(self, path: str, content: Any) -> int:
        """Let a write take its time; return how many bytes fit."""
        self.scheduler.spend(self.scheduler.chance.expovariate(1 / CALL))
        return self.disk.written(path, content)

    def flock(self, descriptor: Any, operation: int) -> None:
        task = self.task()
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        if task is None or self.disk.path(number) is None:
            self._flock(descriptor, operation)
            return
        self.scheduler.spend(self.scheduler.chance.expovariate(1 / CALL))
        alone = bool(operation & fcntl.LOCK_EX)
        if not self.disk.lock(number, alone=alone):
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))

    # Time, names and ends of processes.

    def monotonic(self) -> float:
        return _MONOTONIC() if self.task() is None else self.scheduler.tick()

    def time(self) -> float:
        return _TIME() if self.task() is None else 1.8e9 + self.scheduler.tick()

    def sleep(self, seconds: float) -> None:
        if self.task() is None:
            _SLEEP(seconds)
        else:
            self.scheduler.spend(seconds)

    def stat(self, path: Any, *rest: Any, **more: Any) -> os.stat_result:
        if self.task() is not None and not isinstance(path, int):
            found = (
                _PROCESS.match(os.fspath(path))
                if isinstance(path, str | os.PathLike)
                else None
            )
            if found is not None:
                assert self.cluster is not None
                path = "/proc/self" if self.cluster.alive(int(found[1])) else "/nowhere"
        result: os.stat_result = self._real["stat"](path, *rest, **more)
        return result

    def getpid(self) -> int:
        task = self.task()
        return int(self._real["getpid"]() if task is None else task.owner.pid)

    def gethostname(self) -> str:
        task = self.task()
        return _HOSTNAME() if task is None else str(task.owner.host)

    def exit(self, code: int) -> None:
        task = self.task()
        if task is None:
            self._real["_exit"](code)
            return
        task.owner.die(code)
        self.scheduler.check_alive()

    def getloadavg(self) -> tuple[float, float, float]:
        if self.task() is not None:
            return (1.0, 1.0, 1.0)
        found: tuple[float, float, float] = self._real["getloadavg"]()
        return found

    def killpg(self, group: int, number: int) -> None:
        if self.task() is None:
            self._real["killpg"](group, number)
            return
        assert self.cluster is not None
        for job in self.cluster.jobs:
            if job.pid == group:
                job.signal(number)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put these calls in place of the system's within the block."""
        ours: list[tuple[Any, str, Callable[..., Any]]] = [
            (builtins, "open", self.open),
            (io, "open", self.open),
            (fcntl, "flock", self.flock),
            (time, "monotonic", self.monotonic),
            (time, "perf_counter", self.monotonic),
            (time, "process_time", self.monotonic),
            (time, "time", self.time),
            (time, "sleep", self.sleep),
            (socket, "gethostname", self.gethostname),
            (os, "open", self.os_open),
            (os, "close", self.os_close),
            (os, "fsync", self.fsync),
            (os, "write", self.os_write),
            (os, "replace", self.replace),
            (os, "rename", self.replace),
            (os, "unlink", self.unlink),
            (os, "remove", self.unlink),
            (os, "mkdir", self.mkdir),
            (os, "rmdir", self.rmdir),
            (os, "stat", self.stat),
            (os, "getpid", self.getpid),
            (os, "_exit", self.exit),
            (os, "getloadavg", self.getloadavg),
            (os, "killpg", self.killpg),
        ]
        with replaced(ours):
            yield


_MONOTONIC, _TIME, _SLEEP = time.monotonic, time.time, time.sleep
_HOSTNAME = socket.gethostname


@contextmanager
def replaced(places: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Put other values in these places within the block."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    for owner, name, value in places:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)


class _Written(io.FileIO):
    """A file of the simulated disk that is open for writing."""

    def __init__(self, calls: Calls, path: str, file: Any, mode: str) -> None:
        super().__init__(file, mode)
        self._calls, self._path, self._owner = calls, path, calls.process()
        calls.objects.add(self.fileno())

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        if self._owner.code is not None:
            # Its process is dead: what it had not written yet is lost.
            return len(view)
        fits = self._calls.write(self._path, view)
        return super().write(view[:fits]) or 0

    def close(self) -> None:
        if self.closed:
            return
        self._calls.objects.discard(self.fileno())
        if self._owner.code is None:
            self._calls.disk.closed(self.fileno())
        super().close()
