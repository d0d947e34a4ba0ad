"""The server's progress while its model learns: lines in the log, and a sign file in
the run's folder for `hpcfed watch`.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from hpcfed.errors import remark
from hpcfed.results.signs import EVERY, LearningSign, leave_sign, remove_sign
from hpcfed.server.learning import Progress
from hpcfed.words import duration

SECONDS_BETWEEN_LINES = 5.0
"""Seconds between two lines about the server's progress."""


class Pacer:
    """Reports a step every few seconds only.

    Until then losses stay on the device: reading one makes the host wait.
    """

    def __init__(
        self, every: float, *, first: bool = False, last: bool = False
    ) -> None:
        """Report at most once in `every` seconds; with `first` and `last`, always
        report a network's first or last step, too.
        """
        self._every = every
        self._first = first
        self._last = last
        self._network = ""
        self._began = self._due = 0.0
        self._resumed = 0

    def sign(
        self, network: str, done: int, steps: int, losses: Tensor
    ) -> LearningSign | None:
        """Return how far a network is, if a report is due; else None."""
        now = time.monotonic()
        if network != self._network:
            self._network, self._began, self._resumed = network, now, done - 1
            self._due = now if self._first else now + self._every
        if now < self._due and not (self._last and done == steps):
            return None
        self._due = now + self._every
        loss = float(losses[done - 1])
        seconds = now - self._began
        return LearningSign(network, done, steps, loss, seconds, self._resumed)


class ProgressLines:
    """Prints how far training is, on one rank only.

    A network that trains within seconds prints only its last step.
    """

    def __init__(self, *, visible: bool) -> None:
        self._visible = visible
        self._pacer = Pacer(SECONDS_BETWEEN_LINES, last=True)

    def __call__(self, network: str, done: int, steps: int, losses: Tensor) -> None:
        if not self._visible:
            return
        sign = self._pacer.sign(network, done, steps, losses)
        if sign is not None:
            left = "" if done == steps else f"  ETA {duration(sign.left)}"
            remark(f"server: {network} step {done}/{steps}  loss {sign.loss:.4g}{left}")


@contextmanager
def leaving_signs(path: Path) -> Iterator[Progress]:
    """Yield a callback that writes a sign every few seconds; remove it at the end."""
    pacer = Pacer(EVERY, first=True)

    def leave(network: str, done: int, steps: int, losses: Tensor) -> None:
        sign = pacer.sign(network, done, steps, losses)
        if sign is not None:
            leave_sign(path, sign)

    try:
        yield leave
    finally:
        remove_sign(path)
