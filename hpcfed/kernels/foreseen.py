"""Kernels that a run will need, compiled by other processes while it reads its data."""

import json
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread

from hpcfed.kernels import nvrtc
from hpcfed.runtime import cache as disk

PATIENCE = 20
"""Seconds to wait for a kernel, before this process compiles it itself."""
_FAILURES = (OSError, ValueError)
_codes: dict[str, Future[bytes | None]] = {}
"""By name in the cache; None: it was not compiled."""


def begin(jobs: dict[str, nvrtc.Job], *, processes: int) -> None:
    """Compile jobs in the background, given by their names in the cache, if it lacks
    them.
    """
    missing = []
    for name in jobs:
        if name not in _codes and disk.read(name) is None:
            _codes[name] = Future()
            missing.append(name)
    for number in range(min(processes, len(missing))):
        # Dealt out in turn: kernels of one layer, which take about as long, go to
        # different processes.
        share = {name: jobs[name] for name in missing[number::processes]}
        # It ends with this process, which may end before all are compiled.
        Thread(target=_compile_apart, args=(share,), daemon=True).start()


def take(name: str) -> bytes | None:
    """Return a kernel's machine code, as soon as it is compiled; None if nobody does."""
    code = _codes.get(name)
    with suppress(TimeoutError):
        return None if code is None else code.result(PATIENCE)
    return None


def _compile_apart(jobs: dict[str, nvrtc.Job]) -> None:
    """Compile jobs in another process."""
    waiting = iter([_codes[name] for name in jobs])
    try:
        for code in _compiled(jobs.values()):
            next(waiting).set_result(code or None)
    # No kernel may be waited for in vain.
    finally:
        for late in waiting:
            late.set_result(None)


def _compiled(jobs: Iterable[nvrtc.Job]) -> Iterable[bytes]:
    """Yield the machine code of each job; of fewer, if the process fails."""
    # Without the script's folder in its path, where modules have names of packages.
    command = [sys.executable, "-P", nvrtc.__file__]
    pipe = subprocess.PIPE
    with (
        suppress(*_FAILURES),
        subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(list(jobs)).encode())
        process.stdin.close()
        # Without torch it may find another library.
        if json.loads(process.stdout.readline()) != nvrtc.version():
            process.kill()
            return
        while head := process.stdout.read(nvrtc.LENGTH_BYTES):
            size = int.from_bytes(head)
            code = process.stdout.read(size)
            if len(code) < size:
                return
            yield code
