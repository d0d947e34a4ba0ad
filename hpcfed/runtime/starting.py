"""What a process does before its first round, and what it does once and then keeps.

Everything is counted where it is done.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Literal

Part = Literal["imports", "world", "data", "network", "samples", "opening"]
Work = Literal["compiled", "first_steps", "captured"]
PARTS: dict[Part, str] = {
    "imports": "imports of the program",
    "world": "devices, MPI and process groups",
    "data": "reading the data set and dealing it out",
    "network": "building and trying the network",
    "samples": "copying samples to the device",
    "opening": "all else before the first round",
}
"""What comes before the first round, in this order."""
WORKS: dict[Work, str] = {
    "compiled": "CUDA kernels that were compiled, not found in the cache",
    "first_steps": "steps of a new shape on a GPU, and what was compiled for them",
    "captured": "graphs that were captured on a GPU",
}
"""What is done once, mostly in the first rounds."""


def _figures() -> dict[str, tuple[str, str]]:
    found = {}
    for part, meaning in PARTS.items():
        found[f"start_{part}"] = "s", f"before the first round: {meaning}"
    for work, meaning in WORKS.items():
        found[work] = "1", meaning
        found[f"{work}_seconds"] = "s", f"{meaning}: seconds of the host"
    return found


FIGURES = _figures()
"""Units and meanings, by their names in run.h5."""


class Starting:
    """Counts for one run after the other."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._program: float | None = None
        """When the program began, until its first run begins."""
        self._since: float | None = None
        """When the current part began; None while rounds run."""
        self._parts: dict[Part, float] = {}
        self._works: dict[Work, tuple[int, float]] = {}

    def begin_program(self) -> None:
        """Note that the program `hpcfed` begins."""
        self._program = time.monotonic()

    def begin_run(self) -> None:
        """Note that a run begins: in the program, what came before are imports."""
        now = time.monotonic()
        self._parts = {} if self._program is None else {"imports": now - self._program}
        self._works = {}
        self._since, self._program = now, None

    def reached(self, part: Part) -> None:
        """Count the time since the previous part for this one, which ends here."""
        now = time.monotonic()
        with self._lock:
            # Stacked runs begin their rounds one by one: the first one counts.
            if self._since is not None:
                self._parts[part] = self._parts.get(part, 0.0) + now - self._since
                self._since = None if part == "opening" else now

    @contextmanager
    def counted(self, work: Work) -> Iterator[None]:
        """Count what is done within the block."""
        begin = time.monotonic()
        yield
        seconds = time.monotonic() - begin
        with self._lock:
            number, before = self._works.get(work, (0, 0.0))
            self._works[work] = number + 1, before + seconds

    def figures(self) -> dict[str, float]:
        """Return what was counted so far, by the names of `FIGURES`."""
        found = {}
        for part in PARTS:
            found[f"start_{part}"] = self._parts.get(part, 0.0)
        for work in WORKS:
            number, seconds = self._works.get(work, (0, 0.0))
            found[work] = float(number)
            found[f"{work}_seconds"] = seconds
        return found


starting = Starting()
"""This process's."""
