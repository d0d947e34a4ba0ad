"""Tells the stories of many seeds, in processes of their own."""

import os
import signal
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path

from benchmarks.simulated.stories import Teller
from benchmarks.simulated.told import Told
from benchmarks.simulated.work import WHOLE, Length

_teller: Teller | None = None
"""This process's."""


def told_by(
    scratch: Path,
    seeds: Sequence[int],
    *,
    processes: int,
    plant: str | None,
    keep_trace: bool,
    length: Length = WHOLE,
) -> Generator[Told]:
    """Tell the stories of all seeds, in their order; end the processes if the caller
    asks for no more.
    """
    begin = partial(_begin, scratch, plant, keep_trace, length)
    # Not forked: each begins as a replay does.
    context = get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=begin) as pool:
        with _ignoring_interrupts():
            stories = deque(pool.submit(_tell, seed) for seed in seeds)
        try:
            while stories:
                yield stories.popleft().result()
        finally:
            # Without cancelling those that wait: then the pool's thread would fail.
            for child in active_children():
                child.terminate()


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C, also in processes that start meanwhile: the terminal tells them,
    too, but it is for the first process to end them.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _begin(scratch: Path, plant: str | None, keep_trace: bool, length: Length) -> None:
    global _teller
    _teller = Teller(
        scratch / str(os.getpid()), length=length, plant=plant, keep_trace=keep_trace
    )


def _tell(seed: int) -> Told:
    assert _teller is not None
    return _teller.tell(seed)
