"""Measured upper limits of a device: bytes of a large copy, and arithmetic of a large
matrix product.

A ceiling is the best of several trials: other load on the machine can only make a trial
slower. The variation of the trials shows whether the machine was quiet.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import torch

COPIED = {"cuda": 2**28, "cpu": 2**24}
"""Floats to copy: far more than caches hold."""
SIDE = {"cuda": 8192, "cpu": 1024}
"""Rows and columns of the matrix."""
TRIALS = 5
REPEATS = 5
"""Repeats of a trial; the best one counts, because a disturbed one says nothing."""


@dataclass(frozen=True)
class Ceilings:
    """The highest speeds that a device reaches."""

    bytes_per_second: float
    flops: float
    """FLOP/s."""
    variation: float = 0.0
    """Standard deviation of the trials divided by their mean, for copies or products,
    whichever varies more.
    """

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype = torch.float32) -> "Ceilings":
        """Measure a device; `dtype` is that of the matrix product, and float32 means
        TF32 on devices that have it.
        """
        source = torch.randn(COPIED[device.type], device=device)
        target = torch.empty_like(source)
        side = SIDE[device.type]
        matrix = torch.randn(side, side, device=device, dtype=dtype)
        cuda = device.type == "cuda"
        copying, multiplying = [], []
        # "high" means TF32. The run's own setting is restored afterwards.
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            # Alternate, so that other load affects both. The first turn warms up.
            for _ in range(1 + TRIALS):
                copying.append(_trial(lambda: target.copy_(source), cuda=cuda))
                multiplying.append(_trial(lambda: matrix @ matrix, cuda=cuda))
        finally:
            torch.set_float32_matmul_precision(before)
        return cls.of_trials(
            copying[1:],
            multiplying[1:],
            # A copy reads and writes; a product multiplies and adds.
            moved=2 * source.nbytes,
            arithmetic=2 * side**3,
        )

    @classmethod
    def of_trials(
        cls,
        copying: Sequence[float],
        multiplying: Sequence[float],
        *,
        moved: float,
        arithmetic: float,
    ) -> "Ceilings":
        """Take the best trial, in seconds, for `moved` bytes and `arithmetic` FLOPs."""
        return cls(
            bytes_per_second=moved / min(copying),
            flops=arithmetic / min(multiplying),
            variation=max(map(_variation, (copying, multiplying))),
        )


def _variation(seconds: Sequence[float]) -> float:
    return stdev(seconds) / fmean(seconds)


def _trial(work: Callable[[], Any], *, cuda: bool) -> float:
    """Return the seconds of the best repeat."""
    return min(_timed(work, cuda=cuda) for _ in range(REPEATS))


def _timed(work: Callable[[], Any], *, cuda: bool) -> float:
    if not cuda:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    # Events are timed on the device; the host's clock would include the launch.
    first = torch.cuda.Event(enable_timing=True)
    last = torch.cuda.Event(enable_timing=True)
    first.record()
    work()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3
