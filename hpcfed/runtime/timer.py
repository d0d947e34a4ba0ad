"""Where the time of a round goes, by phase, without slowing it down.

On a GPU a boundary between phases is an event in the stream. It is read after the
round, so nothing waits inside a round. Rounds follow each other without a gap:
recording a round's results counts as `record` of the next round. Each of several
stacked seeds has its own timer: a phase includes the engine's work for all of them, and
`other` includes the wait for the other seeds.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

    # The command line must not load torch, which this import would.
    from hpcfed.runtime.world import World

PHASES = (
    "sample",
    "download",
    "train",
    "attack",
    "upload",
    "aggregate",
    "server",
    "evaluate",
    "record",
    "other",
)
"""`other` is everything outside of a phase: the loop itself."""


class Timer:
    """Measures the phases of one run's rounds on this rank."""

    def __init__(self, device: "torch.device") -> None:
        self._device = device
        self._events: Callable[[], Any] | None = None
        """Makes events of a GPU; None on a CPU."""
        self._stream: Callable[[torch.device], Any] | None = None
        """Tells the queue that gets this thread's work; None on a CPU."""
        if device.type != "cpu":
            # Imported late, because this loads torch.
            from hpcfed.runtime import accelerator

            self._events = accelerator.time_stamps(device)
            self._stream = accelerator.current_stream
        self._marks: list[tuple[str, Any]] = []
        """Phases of this round, each with the time or event at which it began."""
        self._free: list[Any] = []
        """Events of earlier rounds."""
        self._taken: list[Any] = []
        """This timer's own events among the marks."""
        self._inside = False
        self._round_began = 0.0
        self.current = "other"
        """The phase in progress, for error messages."""
        self.on_cores = 0.0
        """Seconds that this process, with all its threads, spent on cores in the last
        round.
        """
        self._cores_began = 0.0
        self.changes = 0
        """How often the phase has changed: while it changes, the run does not hang."""
        self.start()

    def start(self) -> None:
        """Discard all measurements; the first round begins now."""
        self._synchronize()
        self._marks.clear()
        self._free += self._taken
        self._taken.clear()
        self._mark("other")
        self._round_began = time.perf_counter()
        self._cores_began = time.process_time()

    def phase(self, name: str) -> "_Phase":
        """Count the time within the block for this phase, or an outer one."""
        return _Phase(self, name)

    def _enter(self, name: str) -> bool:
        """Begin a phase, and return True, unless another is open."""
        # A phase may call a function that opens another phase; the caller's counts.
        if self._inside:
            return False
        self._inside = True
        self._mark(name)
        return True

    def _leave(self) -> None:
        self._mark("other")
        self._inside = False

    def switch(self, name: str, at: Any = None) -> str:
        """Count time for this phase from now on, or since the `stamp` of another timer,
        whatever phase is open; return the previous phase.
        """
        before = self.current
        self._mark(name, at)
        return before

    def lap(self) -> tuple[np.ndarray, float]:
        """End the round and begin the next; return seconds by phase, and in all."""
        self._mark("other")
        self._synchronize()
        now = time.perf_counter()
        seconds = np.zeros(len(PHASES))
        for (name, begin), (_, end) in pairwise(self._marks):
            # Events count in milliseconds.
            elapsed = begin.elapsed_time(end) / 1e3 if self._events else end - begin
            seconds[PHASES.index(name)] += elapsed
        wall = now - self._round_began
        self._round_began = now
        on_cores = time.process_time()
        self.on_cores = on_cores - self._cores_began
        self._cores_began = on_cores
        # The last mark begins the next round, so no time is lost between two.
        del self._marks[:-1]
        self._free += self._taken[:-1]
        del self._taken[:-1]
        return seconds, wall

    def _mark(self, name: str, at: Any = None) -> None:
        self.current = name
        self.changes += 1
        self._marks.append((name, self._own_stamp() if at is None else at))

    def stamp(self) -> Any:
        """Return a time stamp; on a GPU, an event in the stream."""
        if self._events is None:
            return time.perf_counter()
        return self._recorded(self._events())

    def _own_stamp(self) -> Any:
        """Return a stamp that no other timer gets: its event is recorded again after
        this round, because making one takes the host as long as recording it.
        """
        if self._events is None:
            return time.perf_counter()
        event = self._recorded(self._free.pop() if self._free else self._events())
        self._taken.append(event)
        return event

    def _recorded(self, event: Any) -> Any:
        """Return the event, which the device will reach after its work so far. The host
        does not wait for it, unlike a synchronisation.
        """
        assert self._stream is not None
        event.record(self._stream(self._device))
        return event

    def _synchronize(self) -> None:
        if self._events is not None:
            from hpcfed.runtime import accelerator

            accelerator.synchronize(self._device)


class _Phase:
    """The context of a phase. Not by contextlib, whose generators take longer than all
    else here.
    """

    __slots__ = ("_name", "_opened", "_timer")

    def __init__(self, timer: Timer, name: str) -> None:
        self._timer = timer
        self._name = name

    def __enter__(self) -> None:
        self._opened = self._timer._enter(self._name)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        # After an exception `current` must still name the phase that failed.
        if self._opened and kind is None:
            self._timer._leave()


# Who observes a run: no one, unless a profile was asked for.  A process has one
# observer, just as it has one profiler. The run reports its beginning and end to it,
# and makes its timers through it. The server reports its spans and steps.


class Observer:
    """Receives all reports, and does nothing."""

    def begin(self, world: "World") -> None:
        """Note that the run begins: all ranks call it, as soon as they meet."""

    def end(self, world: "World", folder: Path | None) -> None:
        """Note that the last result is on disk: all ranks call it together."""

    def timer(self, device: "torch.device") -> Timer:
        """Make a timer for a run's rounds."""
        return Timer(device)

    def span(self, name: str) -> AbstractContextManager[None]:
        """Return a context for one span of the server's work."""
        return nullcontext()

    def step(self, network: str, done: int, steps: int) -> None:
        """Note how many of its steps the server's network has done."""


_observer = Observer()


def observer() -> Observer:
    """Return this process's observer."""
    return _observer


@contextmanager
def observed_by(other: Observer) -> Iterator[None]:
    """Use another observer within the block."""
    # One per process instead of an argument: the server's training would have to pass
    # it through functions that have no other use for it.
    global _observer
    before, _observer = _observer, other
    try:
        yield
    finally:
        _observer = before
