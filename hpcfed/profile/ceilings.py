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
"""Floats: well beyond caches."""
SIDE = {"cuda": 8192, "cpu": 1024}


@dataclass(frozen=True)
class Ceilings:
    """Of the device, measured."""

    bytes_per_second: float
    flops: float

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype = torch.float32) -> "Ceilings":
        """`dtype` is that of the matrix product; float32 is TF32 on devices that have
        it.
        """
        source = torch.randn(COPIED[device.type], device=device)
        target = torch.empty_like(source)
        matrix = torch.randn(
            SIDE[device.type], SIDE[device.type], device=device, dtype=dtype
        )
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            return cls(
                2
                * source.numel()
                * source.element_size()
                / _seconds(lambda: target.copy_(source), device),
                2 * len(matrix) ** 3 / _seconds(lambda: matrix @ matrix, device),
            )
        finally:
            torch.set_float32_matmul_precision(before)


def _seconds(work: Callable[[], Any], device: torch.device, repeats: int = 7) -> float:
    return median(_timed(work, cuda=device.type == "cuda") for _ in range(repeats))


def _timed(work: Callable[[], Any], *, cuda: bool) -> float:
    if not cuda:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    work()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3
