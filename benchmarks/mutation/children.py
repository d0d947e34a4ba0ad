"""Tests in forks of this process: it has imported all, and each fork starts as it was."""

import os
import resource
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest

FAILED = 1
GRACE = 5.0
"""CPU seconds that a test may take, beside a multiple of what it takes usually."""
PATIENCE = 60.0
"""Seconds that a test may take, beside a multiple of them; the machine may be busy."""
MULTIPLE = 5


class End(NamedTuple):
    """How a fork has ended."""

    code: int
    """Exit code; negative: a signal."""
    hung: bool
    """Whether it was killed because it did not go on."""
    told: list[str]
    """Its lines; the last one names the test that it was at."""

    @property
    def went_on_forever(self) -> bool:
        """Whether it took too much time, of the CPU or by the clock."""
        return self.hung or self.code == -signal.SIGXCPU


class Failing:
    """Ends the process at the first test that fails."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os._exit(FAILED)


def cpu_seconds() -> float:
    """Return what this process and its children have taken so far."""
    return sum(os.times()[:4])


def limit(seconds: float) -> None:
    """Kill this process once it has taken so many more CPU seconds."""
    times = resource.getrusage(resource.RUSAGE_SELF)
    used = times.ru_utime + times.ru_stime
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(used + GRACE + MULTIPLE * seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, most))


def run(items: Sequence[pytest.Item]) -> None:
    """Run tests as pytest does."""
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)


def in_fork(work: Callable[[Callable[[str], None]], None], scratch: Path) -> End:
    """Do work in a fork that is given a function to tell lines with. It is killed when
    it tells nothing for as long as its last line says: `SECONDS REST`.
    """
    read, write = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        _be_child(work, write)
    os.close(write)
    try:
        return _attend(pid, read)
    finally:
        os.close(read)
        with suppress(ProcessLookupError):  # what tests have started, and left
            os.killpg(pid, signal.SIGKILL)
        shutil.rmtree(scratch, ignore_errors=True)


def _be_child(work: Callable[[Callable[[str], None]], None], write: int) -> NoReturn:
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
        work(lambda line: _write_all(write, f"{line}\n".encode()))
        os._exit(0)
    finally:  # an exception, or sys.exit within a test
        os._exit(FAILED)


def _write_all(file: int, content: bytes) -> None:
    while content:
        content = content[os.write(file, content) :]


def _attend(pid: int, read: int) -> End:
    """Read what a fork tells until it ends, or has to be ended."""
    ended = os.pidfd_open(pid)
    told = b""
    patience, hung = PATIENCE, False
    last = time.monotonic()
    try:
        while True:
            ready, _, _ = select.select([read, ended], [], [], patience)
            if read in ready:
                told += os.read(read, 2**16)
                patience, last = _patience(told), time.monotonic()
                if ended not in ready:
                    continue
            if ended not in ready:
                if time.monotonic() - last < patience:
                    continue
                hung = True
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                os.kill(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.set_blocking(read, False)
            with suppress(BlockingIOError):
                while more := os.read(read, 2**16):
                    told += more
            return End(code, hung, told.decode().splitlines())
    finally:
        os.close(ended)


def _patience(told: bytes) -> float:
    whole, _, _ = told.rpartition(b"\n")
    seconds, _, _ = whole.rpartition(b"\n")[2].partition(b" ")
    return PATIENCE + MULTIPLE * float(seconds or 0)
