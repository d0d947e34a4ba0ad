"""Who looks on while a run goes on: nobody, unless a profile was asked for.

A process has one observer, as it has one profiler: the run tells it of its beginning
and end, makes its timers through it, and the server tells it of its parts and steps.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from hpcfed.record.timing import Timer

if TYPE_CHECKING:
    import torch

    from hpcfed.runtime.world import World


class Observer:
    """Sees everything, does nothing."""

    def begin(self, world: "World") -> None:
        """All ranks call it together, as soon as they know each other."""

    def end(self, world: "World", folder: Path | None) -> None:
        """All ranks call it together, after the last result is on disk; server ranks
        know of no folder.
        """

    def timer(self, device: "torch.device") -> Timer:
        return Timer(device)

    def span(self, name: str) -> AbstractContextManager[None]:
        """Around a part of the server's work."""
        return nullcontext()

    def step(self, network: str, done: int, steps: int) -> None:
        """The server's network has made so many of its steps."""


_observer = Observer()


def observer() -> Observer:
    return _observer


@contextmanager
def observed_by(other: Observer) -> Iterator[None]:
    global _observer
    before, _observer = _observer, other
    try:
        yield
    finally:
        _observer = before
