"""Who observes a run: nobody, unless a profile was asked for.

A process has one observer, as it has one profiler: the run tells it of its beginning
and end, makes its timers through it, and the server tells it of its spans and steps.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from hpcfed.runtime.timer import Timer

if TYPE_CHECKING:
    # The command line must not load torch, which these would.
    import torch

    from hpcfed.runtime.world import World


class Observer:
    """Is told of everything, and does nothing."""

    def begin(self, world: "World") -> None:
        """Hear that the run begins: all ranks call it together, as soon as they know
        each other.
        """

    def end(self, world: "World", folder: Path | None) -> None:
        """Hear that the last result is on disk: all ranks call it together; server
        ranks know of no folder.
        """

    def timer(self, device: "torch.device") -> Timer:
        """Make a timer for a run's rounds."""
        return Timer(device)

    def span(self, name: str) -> AbstractContextManager[None]:
        """Return a context for one span of the server's work."""
        return nullcontext()

    def step(self, network: str, done: int, steps: int) -> None:
        """Hear how many of its steps the server's network has made."""


_observer = Observer()


def observer() -> Observer:
    """Return this process's observer."""
    return _observer


@contextmanager
def observed_by(other: Observer) -> Iterator[None]:
    """Have another observer within."""
    # One for the process, and not handed around: the server's training would have to
    # pass it through functions that have no other use for it.
    global _observer
    before, _observer = _observer, other
    try:
        yield
    finally:
        _observer = before
