"""Processes that make one run after the other, alone or on MPI ranks.

They are forked from a process that has loaded torch (`benchmarks/harness/forked.py`). A
job that dies or hangs is started again.
"""

import json
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from benchmarks import launching
from benchmarks.harness.waiting import FORKED, Forking

HANG = 150.0
"""Seconds after which a run of seconds counts as hung."""
JOIN = 60.0
"""Seconds in which a job's ranks must be there."""
CRASHED, HUNG = -2, -3
"""Codes of a run whose process has died, or does not end."""
MOST_RUNS = 300
"""A job makes way for a new one after as many runs."""


@dataclass(frozen=True)
class Order:
    """What a job shall run."""

    words: list[str]
    stop_after: int = 0
    """The round, counted from 1, in which it is told to stop; 0: never."""
    names: Sequence[int] = ()
    """The clients whose random numbers clients get; none: their own."""


@dataclass(frozen=True)
class Ended:
    """How a run has ended."""

    code: int
    """Its exit code; -1: an exception left the program."""
    out: str = ""
    err: str = ""
    """What all ranks have said."""


class Job:
    """A process, or the ranks of an MPI job, that runs what it is told."""

    def __init__(
        self, ranks: int, folder: Path, server: Forking, modules: Sequence[str] = ()
    ) -> None:
        self._ranks = ranks
        self._folder = folder
        self._server = server
        self._modules = modules
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: list[IO[str]] = []
        self._sockets: list[socket.socket] = []
        self._runs = 0
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, order: Order) -> Ended:
        """Run it on every rank, and return how that has ended."""
        if self._process is None or self._runs >= MOST_RUNS:
            self._begin()
        self._runs += 1
        text = json.dumps(asdict(order))
        try:
            for lines in self._lines:
                print(text, file=lines, flush=True)
            codes = [self._answer(lines) for lines in self._lines]
        except TimeoutError:
            self.end()
            return self._told(HUNG)
        except (OSError, ValueError):
            return self._died()
        # The first rank speaks for all, but no rank may fail alone.
        return self._told(codes[0] or next(filter(None, codes), 0))

    def _answer(self, lines: IO[str]) -> int:
        return int(lines.readline())  # ValueError where the process has gone

    def _told(self, code: int) -> Ended:
        texts = []
        for name in ("out", "err"):
            files = [self._folder / f"{name}-{rank}.txt" for rank in range(self._ranks)]
            said = [file.read_text(errors="replace") for file in files if file.exists()]
            texts.append("".join(said))
        return Ended(code, *texts)

    def _died(self) -> Ended:
        """Return how an MPI job has ended as a whole: an abort of one rank ends all."""
        assert self._process is not None
        code = CRASHED
        if self._ranks > 1:
            with suppress(subprocess.TimeoutExpired):
                code = self._process.wait(JOIN)
        told = self._told(code)
        self.end()
        return told

    def _begin(self) -> None:
        self.end()
        self._runs = 0
        path = self._folder / "socket"
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
            listening.listen(self._ranks)
            listening.settimeout(JOIN)
            self._process = self._start(path)
            for _ in range(self._ranks):
                connection, _ = listening.accept()
                connection.settimeout(HANG)
                self._sockets.append(connection)
                self._lines.append(connection.makefile("rw"))
        # In the order of ranks, so that the root's answer is the first.
        numbers = [int(lines.readline()) for lines in self._lines]
        self._lines = [self._lines[numbers.index(rank)] for rank in range(self._ranks)]

    def _start(self, path: Path) -> subprocess.Popen[bytes]:
        words = ["-I", "-S", FORKED, self._server.socket]
        words += ["-m", "benchmarks.swarm.worker", str(path), str(self._folder)]
        words += self._modules
        command = launching.on_ranks(self._ranks, words)
        variables = {
            name: value
            for name, value in launching.environment().items()
            if not name.startswith(("OMPI_COMM", "PMI", "SLURM_"))
        }
        variables |= {
            "OMP_NUM_THREADS": "1",
            # A rank that waits leaves its core to others.
            "OMPI_MCA_mpi_yield_when_idle": "1",
            # The names of sockets are short.
            "PRTE_MCA_prte_tmpdir_base": str(self._folder),
        }
        return subprocess.Popen(
            command,
            cwd=launching.ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._log(),
            start_new_session=True,
        )

    def _log(self) -> IO[bytes]:
        return (self._folder / "launcher.txt").open("wb")

    def end(self) -> None:
        """End its processes."""
        for connection in self._sockets:
            connection.close()
        for lines in self._lines:
            with suppress(OSError):
                lines.close()
        self._sockets, self._lines = [], []
        if self._process is not None:
            # mpirun ends its ranks when it is told to end.
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = None
