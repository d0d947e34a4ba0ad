"""hpcfed on a simulated cluster: MPI, process groups, threads, signals and processes
come from the simulation, all else is the program itself.
"""

import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import torch

from benchmarks.simulated.calls import Calls, replaced
from benchmarks.simulated.messages import Communicator, Distributed, Meetings
from benchmarks.simulated.processes import Cluster, Job, Process
from hpcfed import methods
from hpcfed.cli import commands, run, settings
from hpcfed.cli import resume as resuming
from hpcfed.clients import lockstep
from hpcfed.clients.engine import Engine
from hpcfed.errors import UserError
from hpcfed.experiment import progress, recording
from hpcfed.results import results, safe, sandbox, stored, study
from hpcfed.results.blank import blank_file
from hpcfed.results.reading import record_of
from hpcfed.results.run import RunRecord
from hpcfed.runtime import (
    collectives,
    environment,
    location,
    mpi,
    process_group,
    signals,
    stalls,
)
from hpcfed.runtime.launcher import Launch, launched
from hpcfed.studies import attempt

MEMORY = 2**34
"""Bytes that a simulated machine has."""
MOST_RECORDS = 200
NO_DEVICES = (torch.cuda, torch.xpu, torch.mtia)
"""Devices that this machine has not."""
TRAINING = (0.01, 0.8)
"""Fewest and most simulated seconds of a rank's training in a round."""


class Machine:
    """Puts the simulation in the place of what hpcfed calls."""

    def __init__(self) -> None:
        self.calls = Calls()
        self.distributed: Distributed | None = None
        # What is read or parsed again is known: that would take half of all time.
        self._known, self._parser, self._in_memory = (
            _Known(),
            _cached_parser(),
            _Records(),
        )

    def take(self, cluster: Cluster) -> None:
        """Use this cluster from now on."""
        self.calls.cluster = cluster
        cluster.close = self.calls.close_left
        cluster.scheduler.on_resume = self.calls.resumed
        cluster.disk.note = cluster.scheduler.note
        self.distributed = Distributed(cluster.scheduler, self.calls.process)

    def run(self) -> None:
        """Run all simulated processes to their ends."""
        try:
            self.calls.scheduler.run()
        finally:
            self.calls.outside()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put the simulation in place within the block."""
        environment.own_source()
        simulated = _Threading(self.calls)
        ours = [
            (mpi, "all_ranks", self._all_ranks),
            (mpi, "on_this_host", _on_this_host),
            (commands, "leave", self._leave),
            (collectives, "dist", _Late(lambda: self.distributed)),
            (process_group, "dist", _Late(lambda: self.distributed)),
            (stalls, "dist", _Late(lambda: self.distributed)),
            (stalls, "socket", SimpleNamespace(create_connection=self._connect)),
            (stalls, "threading", simulated),
            # They were given the clock when they were defined.
            (stalls.Awake.__init__, "__defaults__", (self.calls.monotonic,)),
            (stalls.watch, "__defaults__", (self.calls.monotonic,)),
            (progress, "threading", simulated),
            (lockstep, "threading", simulated),
            (lockstep, "SimpleQueue", simulated.SimpleQueue),
            (signals, "threading", simulated),
            (signals, "signal", _Signals(self.calls)),
            (attempt, "threading", simulated),
            (attempt, "signal", _Signals(self.calls)),
            (attempt, "subprocess", _Subprocess(self.calls)),
            (results, "blank_file", self._in_memory.blank_file),
            (study, "h5py", self._in_memory),
            (resuming, "try_out", _try_out),
            (run, "print_run", lambda folder: None),
            (run, "_begin_early", lambda config: None),
            # It would keep forever what dead processes have left.
            (run, "without_collecting", nullcontext),
            (run, "parse_run", _parse_run),
            (Engine, "train", self._train),
            # Each call would keep a copy of its stack until such a device starts.
            *((kind, "manual_seed_all", lambda seed: None) for kind in NO_DEVICES),
            (recording, "peak_memory", lambda device: MEMORY // 4),
            (location, "usable", lambda: MEMORY),
            (settings, "run_parser", self._parser),
            (methods, "load", _load),
            (stored, "reading", self._known.reading),
            (stored, "record_of", self._known.record_of),
            (environment, "os", _Late(lambda: os, getcwd=lambda: "/simulated")),
        ]
        with self.calls.installed(), replaced(ours):
            yield

    def program(self, words: Sequence[str]) -> None:
        """Be the program `hpcfed` in a simulated process."""
        commands.main(words)

    def _all_ranks(self, launch: Launch) -> Communicator | None:
        process = self.calls.process()
        if launch.alone:
            return None
        job = process.job
        group = job.groups.setdefault("world", Meetings(job.name, job.processes))
        return Communicator(self.calls.scheduler, group, process.rank)

    @property
    def _train(self) -> Callable[..., Any]:
        real, calls = Engine.train, self.calls

        def train(engine: Engine, job: Any) -> Any:
            scheduler = calls.scheduler
            scheduler.spend(scheduler.chance.uniform(*TRAINING))
            return real(engine, job)

        return train

    def _leave(self, launch: Launch, code: int) -> None:
        if launch.rank:
            self.calls.process().job.abort(code)
            self.calls.scheduler.check_alive()
        raise SystemExit(code)

    def _connect(self, address: tuple[str, int], timeout: float) -> Any:
        assert self.distributed is not None
        master, _ = self.distributed.stores[address[1]]
        if master.code is not None:
            raise OSError("nobody listens")
        return SimpleNamespace(close=lambda: None)


class _Records:
    """h5py, with a name of its own for each file in memory: HDF5 refuses to open one
    twice in a process, and here many processes are one.
    """

    _numbers = count()

    def __getattr__(self, name: str) -> Any:
        return getattr(h5py, name)

    def File(self, path: Any, *rest: Any, **more: Any) -> Any:
        if more.get("driver") == "core":
            path = self._own(path)
        return h5py.File(path, *rest, **more)

    def blank_file(self, path: Path, declared: Any) -> Any:
        return blank_file(self._own(path), declared)

    def _own(self, path: Path) -> Path:
        return Path(f"{path}.{next(self._numbers)}")


class _Known:
    """Records that were read before, by the content of their files."""

    def __init__(self) -> None:
        self._records: dict[int, RunRecord] = {}

    @contextmanager
    def reading(self, path: Path) -> Iterator[Any]:
        content = hash(path.read_bytes())
        if content in self._records:
            yield content
            return
        with safe.reading(path) as file:
            yield content, file

    def record_of(self, folder: Path, opened: Any) -> RunRecord:
        if isinstance(opened, tuple):
            content, file = opened
            if len(self._records) > MOST_RECORDS:
                self._records.clear()
            self._records[content] = record_of(folder, file)
            opened = content
        return replace(self._records[opened], folder=folder)


def _cached_parser() -> Callable[..., Any]:
    """Return `run_parser`, which makes each parser once."""
    made: dict[Any, Any] = {}
    real = settings.run_parser

    def parser(fields: Any, method: str, *, add_help: bool = True) -> Any:
        key = method, add_help, *fields
        if key not in made:
            made[key] = real(fields, method, add_help=add_help)
        return made[key]

    return parser


class _Late:
    """Forwards to what is there when it is called, except for what is `given`."""

    def __init__(self, found: Callable[[], Any], **given: Any) -> None:
        self._found = found
        vars(self).update(given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found(), name)


def _on_this_host(comm: Communicator | None) -> Communicator | None:
    return None if comm is None else comm.on_host()


def _try_out(paths: Any) -> None:
    """Look at files as a child process would, without one."""
    for path in paths:
        try:
            if Path(path).stat().st_size:
                sandbox.check_heaps(path)
        except ValueError:
            raise UserError(f"{path} is damaged") from None


_real_parse = settings.parse_run
_load = cache(methods.load)


@cache
def _parsed(words: tuple[str, ...], ranks: int) -> Any:
    return _real_parse(list(words))


def _parse_run(arguments: list[str]) -> Any:
    """Parse a command line, once; what a resumed run reads may change."""
    if "--resume" in arguments:
        return _real_parse(arguments)
    return _parsed(tuple(arguments), launched().size)


class _Event:
    def __init__(self, calls: Calls) -> None:
        self._calls, self._set = calls, False

    def set(self) -> None:
        self._set = True
        if self._calls.task() is not None:
            self._calls.scheduler.changed()

    def clear(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        return self._calls.scheduler.wait(lambda: self._set, "an event", timeout)


class _Thread:
    def __init__(
        self,
        calls: Calls,
        target: Callable[..., None],
        args: Sequence[Any] = (),
        name: str = "",
        daemon: bool = False,
    ) -> None:
        self._calls, self._name = calls, name
        self._do = lambda: target(*args)
        self._task: Any = None

    def start(self) -> None:
        process = self._calls.process()

        def work() -> None:
            try:
                self._do()
            except Exception as error:
                process.stderr.write(f"Traceback: thread {self._name}: {error!r}\n")

        self._task = process.thread(self._name, work)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.ended

    def join(self, timeout: float | None = None) -> None:
        if self._task is not None:
            self._calls.scheduler.wait(
                lambda: self._task.ended, f"the end of thread {self._name}", timeout
            )


class _Queue:
    def __init__(self, calls: Calls) -> None:
        self._calls, self._items = calls, deque[Any]()

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._calls.task() is not None:
            self._calls.scheduler.changed()

    def get(self) -> Any:
        self._calls.scheduler.wait(lambda: bool(self._items), "another program")
        return self._items.popleft()


class _Threading:
    """Python's `threading` for the modules that make threads."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def Thread(
        self, *, target: Any, args: Any = (), name: str = "", daemon: bool = False
    ) -> _Thread:
        return _Thread(self._calls, target, args, name, daemon)

    def Event(self) -> _Event:
        return _Event(self._calls)

    def SimpleQueue(self) -> _Queue:
        return _Queue(self._calls)

    def current_thread(self) -> Any:
        return self._calls.task()

    def main_thread(self) -> Any:
        return self._calls.process().main


class _Signals:
    """Python's `signal` for the modules that set handlers."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        return getattr(signal, name)

    def signal(self, number: int, handler: Any) -> Any:
        handlers = self._calls.process().handlers
        before = handlers.get(number, signal.SIG_DFL)
        handlers[number] = handler
        return before


class _Popen:
    """A simulated child, with the ranks that it may start."""

    def __init__(
        self, calls: Calls, words: Sequence[str], stdout: Any, env: Mapping[str, str]
    ) -> None:
        calls.scheduler.spend(0.1)
        cluster = calls.cluster
        assert cluster is not None
        self._calls = calls
        ranks = int(words[words.index("-n") + 1]) if "-n" in words else 1
        after = list(words[words.index("hpcfed") + 1 :])
        name = f"{calls.process().job.name}+{len(cluster.jobs)}"
        self.job: Job = cluster.start(name, after, ranks=ranks, environment=env)
        self.pid = self.job.pid
        calls.hand_down(stdout.fileno(), self.job.processes)

    def poll(self) -> int | None:
        return self.job.code

    def wait(self, timeout: float | None = None) -> int:
        process: Process = self._calls.process()
        scheduler, job = self._calls.scheduler, self.job
        end = None if timeout is None else scheduler.now + timeout
        while job.code is None:
            left = None if end is None else end - scheduler.now
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired(job.words, timeout or 0.0)
            # A signal interrupts the wait: its handler may raise.
            scheduler.wait(
                lambda: job.code is not None or bool(process.pending), job.name, left
            )
        return job.code

    def terminate(self) -> None:
        self.job.signal(signal.SIGTERM)


class _Subprocess:
    """Python's `subprocess` for studies."""

    STDOUT, DEVNULL = subprocess.STDOUT, subprocess.DEVNULL
    TimeoutExpired = subprocess.TimeoutExpired

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def Popen(
        self, words: Sequence[str], *, stdout: Any, env: Mapping[str, str], **_: Any
    ) -> _Popen:
        return _Popen(self._calls, words, stdout, env)
