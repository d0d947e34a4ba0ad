"""What a device can do at most, measured on it: bytes of a large copy, and arithmetic
of a large matrix product.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

COPIED = {"cuda": 2**28, "cpu": 2**24}
"""Floats of the copy: well beyond caches."""
SIDE = {"cuda": 8192, "cpu": 1024}
"""Rows and columns of the matrix."""


@dataclass(frozen=True)
class Ceilings:
    """The speeds that a device reaches at most."""

    bytes_per_second: float
    flops: float
    """FLOP/s."""

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype = torch.float32) -> "Ceilings":
        """Measure a device; `dtype` is that of the matrix product, and float32 means
        TF32 on devices that have it.
        """
        source = torch.randn(COPIED[device.type], device=device)
        target = torch.empty_like(source)
        side = SIDE[device.type]
        matrix = torch.randn(side, side, device=device, dtype=dtype)
        # "high" means TF32. The run's own arithmetic is put back afterwards.
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            copying = _seconds(lambda: target.copy_(source), device)
            multiplying = _seconds(lambda: matrix @ matrix, device)
        finally:
            torch.set_float32_matmul_precision(before)
        # A copy reads and writes; a product adds and multiplies.
        moved = 2 * source.nbytes
        arithmetic = 2 * side**3
        return cls(
            bytes_per_second=moved / copying,
            flops=arithmetic / multiplying,
        )


def _seconds(work: Callable[[], Any], device: torch.device, repeats: int = 7) -> float:
    cuda = device.type == "cuda"
    times = []
    for _ in range(repeats):
        seconds = _timed(work, cuda=cuda)
        times.append(seconds)
    # Not the mean: the first repeats allocate memory and choose kernels.
    return median(times)


def _timed(work: Callable[[], Any], *, cuda: bool) -> float:
    if not cuda:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    # Events are timed on the device: a host's clock would count the launch, too.
    first = torch.cuda.Event(enable_timing=True)
    last = torch.cuda.Event(enable_timing=True)
    first.record()
    work()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3
