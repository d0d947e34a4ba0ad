"""What the server shows while its model learns: lines in the log, and a sign in the
run's folder for those who watch.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from hpcfed.errors import remark
from hpcfed.results.signs import EVERY, LearningSign, leave_sign, remove_sign
from hpcfed.server.latent_diffusion import Progress
from hpcfed.words import duration

SECONDS_BETWEEN_LINES = 5.0
"""Seconds between two lines about the server's progress."""


class Pacer:
    """Tells of a step now and then, because most steps are worth no word.

    Losses stay on the device until then: reading one makes the host wait for it.
    """

    def __init__(
        self, every: float, *, first: bool = False, last: bool = False
    ) -> None:
        """`first` and `last` say whether a network's first and last steps are told of
        in any case.
        """
        self._every = every
        self._first = first
        self._last = last
        self._network = ""
        self._began = self._due = 0.0

    def sign(
        self, network: str, done: int, steps: int, losses: Tensor
    ) -> LearningSign | None:
        """Return how far a network is, if it is time to tell."""
        now = time.monotonic()
        if network != self._network:
            self._network, self._began = network, now
            self._due = now if self._first else now + self._every
        if now < self._due and not (self._last and done == steps):
            return None
        self._due = now + self._every
        loss = float(losses[done - 1])
        return LearningSign(network, done, steps, loss, now - self._began)


class ProgressLines:
    """Prints how far training is, on the one rank that does.

    A network that is trained within seconds prints its last step alone.
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
    """Return what leaves a sign every few seconds; it is removed at the end."""
    pacer = Pacer(EVERY, first=True)

    def leave(network: str, done: int, steps: int, losses: Tensor) -> None:
        sign = pacer.sign(network, done, steps, losses)
        if sign is not None:
            leave_sign(path, sign)

    try:
        yield leave
    finally:
        remove_sign(path)
