"""Simulated processes: what each has for itself, and what ends it.

A job is what mpirun starts: when a rank fails, the launcher ends the others.
"""

import io
import os
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.simulated.disk import Disk
from benchmarks.simulated.scheduler import Killed, Scheduler, Task

HEAR = 0.5
"""Mean simulated seconds until mpirun has noticed a dead rank."""
GRACE = 5.0
"""Simulated seconds after which mpirun kills ranks that it has asked to end."""
Program = Callable[[Sequence[str]], None]
Handler = Any


class Process:
    """A rank, or a program of its own."""

    halted = False
    slow = 1.0

    def __init__(
        self, cluster: "Cluster", job: "Job", rank: int, environment: Mapping[str, str]
    ) -> None:
        self.cluster, self.job, self.rank = cluster, job, rank
        self.pid = cluster.next_pid()
        self.host = f"node-{rank % cluster.hosts}"
        self.environment = {
            name.encode(): value.encode() for name, value in environment.items()
        }
        self.stderr = io.StringIO()
        self.handlers: dict[int, Handler] = {signal.SIGINT: signal.default_int_handler}
        self.pending: list[int] = []
        self.begun = False
        """Whether it has had a turn: a signal ends a Python that has not begun."""
        self.group: Any = None
        """The default process group."""
        self.code: int | None = None
        self.main: Task | None = None
        self.log: int | None = None
        """The file that its output goes to."""

    @property
    def name(self) -> str:
        return f"{self.job.name}/{self.rank}"

    def start(self, function: Callable[[], None]) -> None:
        scheduler = self.cluster.scheduler
        self.main = scheduler.add(
            self.name, self, lambda: self._live(function), main=True
        )

    def thread(self, name: str, function: Callable[[], None]) -> Task:
        """Start a further thread of the process."""
        return self.cluster.scheduler.add(f"{self.name} {name}", self, function)

    def _live(self, function: Callable[[], None]) -> None:
        code: int = 0
        self.begun = True
        try:
            function()
        except SystemExit as ending:
            code = _code_of(ending)
        except Killed:
            raise
        except BaseException as error:
            self.stderr.write(f"Traceback: {type(error).__name__}: {error}\n")
            code = 130 if isinstance(error, KeyboardInterrupt) else 1
        self.die(code)

    def die(self, code: int) -> None:
        """End at once, with an exit code or minus the number of a signal."""
        if self.code is not None:
            return
        self.code = code
        scheduler = self.cluster.scheduler
        scheduler.note(f"{self.name} ends with {code}")
        if self.log is not None:
            os.write(self.log, self.stderr.getvalue().encode())
        for descriptor in self.cluster.disk.forget(self):
            self.cluster.close(descriptor)
        scheduler.kill(self)
        self.job.ended(self)
        scheduler.changed()

    def receive(self, number: int) -> None:
        """Take a signal."""
        if self.code is not None:
            return
        self.cluster.scheduler.note(f"{self.name} gets {signal.Signals(number).name}")
        if number == signal.SIGKILL:
            self.die(-number)
        elif number == signal.SIGSTOP:
            self.halted = True
        elif number == signal.SIGCONT:
            self.halted = False
            # Others may wait for what it answers.
            self.cluster.scheduler.changed()
        else:
            handler: Handler = signal.SIG_DFL
            if self.begun:
                handler = self.handlers.get(number, handler)
            if handler is signal.SIG_DFL:
                self.die(-number)
            elif handler is not signal.SIG_IGN:
                self.pending.append(number)
                self.cluster.scheduler.changed()

    def handle(self) -> None:
        """Call the handlers of signals that have come; in the main thread."""
        while self.pending:
            number = self.pending.pop(0)
            handler = self.handlers[number]
            if callable(handler):
                handler(number, None)


def _code_of(ending: SystemExit) -> int:
    if ending.code is None:
        return 0
    return ending.code if isinstance(ending.code, int) else 1


class Job:
    """Processes that one launcher has started."""

    def __init__(
        self,
        cluster: "Cluster",
        name: str,
        words: Sequence[str],
        environment: Mapping[str, str],
        *,
        ranks: int,
    ) -> None:
        self.cluster, self.name, self.words, self.ranks = cluster, name, words, ranks
        self.pid = cluster.next_pid()
        self.code: int | None = None
        self.groups: dict[str, Any] = {}
        """The communicators of its ranks, by name."""
        self._ending = False
        self.processes = []
        for rank in range(ranks):
            variables = dict(environment)
            if ranks > 1:
                variables |= {
                    "OMPI_COMM_WORLD_RANK": str(rank),
                    "OMPI_COMM_WORLD_SIZE": str(ranks),
                }
            self.processes.append(Process(cluster, self, rank, variables))
        cluster.jobs.append(self)
        cluster.scheduler.note(f"{name} starts: {ranks} × {shlex.join(words)}")
        for process in self.processes:
            process.start(lambda: cluster.program(words))

    @property
    def told(self) -> str:
        """What its ranks have written."""
        return "".join(process.stderr.getvalue() for process in self.processes)

    @property
    def active(self) -> bool:
        return self.code is None

    def signal(self, number: int) -> None:
        """Send a signal to all ranks, as mpirun does."""
        for process in self.processes:
            process.receive(number)

    def abort(self, code: int) -> None:
        """End all ranks at once, as MPI_Abort does."""
        self._end(code)

    def ended(self, process: Process) -> None:
        """Note that a rank has ended; a failure ends the others."""
        code = process.code or 0
        if all(one.code is not None for one in self.processes):
            self.code = _launchers(code) if self.code is None else self.code
            codes = [_launchers(one.code or 0) for one in self.processes]
            if not self._ending:
                self.code = next(filter(None, codes), 0)
        elif code and not self._ending:
            first = _launchers(code)
            chance = self.cluster.scheduler.chance
            self._ending = True
            self.code_to_come = first
            delay = chance.expovariate(1 / HEAR)
            self.cluster.scheduler.after(delay, lambda: self._end(first))

    def _end(self, code: int) -> None:
        if self.code is not None:
            return
        self._ending = True
        self.code = code
        for process in self.processes:
            process.die(-signal.SIGKILL)


def _launchers(code: int) -> int:
    """Return the code with which a shell sees a process end."""
    return 128 - code if code < 0 else code


class Cluster:
    """All simulated processes, their disk and their clock."""

    def __init__(self, scheduler: Scheduler, disk: Disk, program: Program) -> None:
        self.scheduler, self.disk, self.program = scheduler, disk, program
        self.hosts = 1
        self.watches = False
        """Whether ranks watch for others that hang."""
        self.close: Callable[[int], None] = os.close
        """Closes a dead process's descriptor."""
        self.on_rename: Callable[[Process, str], None] = lambda process, path: None
        """Called when a file has got a new name."""
        self.jobs: list[Job] = []
        self._pids = 10**7

    def next_pid(self) -> int:
        """Return the number of a new process: none that the machine has."""
        self._pids += 1
        return self._pids

    def alive(self, pid: int) -> bool:
        """Tell whether a simulated process has this number."""
        return any(
            process.pid == pid and process.code is None
            for job in self.jobs
            for process in job.processes
        )

    def start(
        self,
        name: str,
        words: Sequence[str],
        *,
        ranks: int = 1,
        environment: Mapping[str, str],
    ) -> Job:
        return Job(self, name, words, environment, ranks=ranks)

    def kill_all(self) -> None:
        """Kill every process at once."""
        for job in self.jobs:
            for process in job.processes:
                process.die(-signal.SIGKILL)
