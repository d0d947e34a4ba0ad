"""Tells the stories of many seeds, in this process or in several."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
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
) -> Iterator[Told]:
    """Tell the stories of all seeds, in their order."""
    begin = partial(_begin, scratch, plant, keep_trace, length)
    if processes == 1:
        begin()
        yield from map(_tell, seeds)
        return
    # Not forked: each begins as a replay does.
    context = get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=begin) as pool:
        try:
            yield from pool.map(_tell, seeds)
        finally:
            pool.shutdown(cancel_futures=True)


def _begin(scratch: Path, plant: str | None, keep_trace: bool, length: Length) -> None:
    global _teller
    _teller = Teller(
        scratch / str(os.getpid()), length=length, plant=plant, keep_trace=keep_trace
    )


def _tell(seed: int) -> Told:
    assert _teller is not None
    return _teller.tell(seed)
