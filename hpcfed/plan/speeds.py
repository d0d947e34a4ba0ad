"""How fast a device and the links between ranks are.

A device has measured ceilings: bytes of a large copy, and arithmetic of a large matrix
product. A ceiling is the best of several trials: other load on the machine can only make
a trial slower. The variation of the trials shows whether the machine was quiet.

Links have a latency and a speed. Exchanges between ranks follow the usual formulas for
rings.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean, median, stdev
from typing import Any

import torch

from hpcfed.analysis.costmodel import fit_cost
from hpcfed.plan.constants import LinkPoint, kind_of
from hpcfed.results.profiles import Ceiling
from hpcfed.runtime import accelerator
from hpcfed.runtime import world as worlds
from hpcfed.runtime.collectives import Collectives

COPIED = {"cuda": 2**28, "cpu": 2**24}
"""Floats to copy: far more than caches hold."""
SIDE = {"cuda": 8192, "cpu": 1024}
"""Rows and columns of the matrix."""
TRIALS = 5
REPEATS = 5
"""Repeats of a trial; the best one counts, because a disturbed one says nothing."""
EXCHANGED = (1_000, 100_000, 2_000_000)
"""Floats of the all-reduces to time."""
EXCHANGES = 15
"""All-reduces of each size."""


class Ceilings(Ceiling):
    """The highest speeds of a device, and how copies or products vary at most."""

    @classmethod
    def of(
        cls,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        *,
        trials: int = TRIALS,
    ) -> "Ceilings":
        """Measure a device with products of this type; float32 is TF32 if it has it."""
        kind = kind_of(device.type)
        source = torch.randn(COPIED[kind], device=device)
        target = torch.empty_like(source)
        side = SIDE[kind]
        matrix = torch.randn(side, side, device=device, dtype=dtype)
        copying, multiplying = [], []
        # "high" means TF32. The run's own setting is restored afterwards.
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            # Alternate, so that other load affects both. The first turn warms up.
            for _ in range(1 + trials):
                copying.append(_trial(lambda: target.copy_(source), device))
                multiplying.append(_trial(lambda: matrix @ matrix, device))
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


def _trial(work: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of the best repeat."""
    return min(_timed(work, device) for _ in range(REPEATS))


def _timed(work: Callable[[], Any], device: torch.device) -> float:
    if not accelerator.is_gpu(device):
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    # Events are timed on the device; the host's clock would include the launch.
    stamp = accelerator.time_stamps(device)
    first, last = stamp(), stamp()
    first.record()
    work()
    last.record()
    accelerator.synchronize(device)
    return float(first.elapsed_time(last)) / 1e3


@dataclass(frozen=True)
class LinkSpeed:
    """The connection between two ranks."""

    bytes_per_second: float
    latency: float
    """Seconds of an empty message."""
    source: str
    """Where these numbers come from, for the reader of a plan."""


ASSUMED = LinkSpeed(10e9, 20e-6, "assumed: 10 GB/s and 20 µs; say --link and --latency")


def ring_pass(size: float, ranks: int, link: LinkSpeed) -> float:
    """Return the seconds of a reduce-scatter, or of an all-gather, of `size` bytes.

    In each of n − 1 turns every rank sends one n-th of the bytes to its neighbour.
    """
    if ranks == 1:
        return 0.0
    turns = ranks - 1
    return turns * (link.latency + size / ranks / link.bytes_per_second)


def ring_allreduce(size: float, ranks: int, link: LinkSpeed) -> float:
    """Return the seconds of an all-reduce: a reduce-scatter, then an all-gather."""
    return 2 * ring_pass(size, ranks, link)


def measured_link(points: tuple[LinkPoint, ...]) -> LinkSpeed | None:
    """Fit latency and speed to all-reduces between ranks of this machine."""
    if len(points) < 2:
        return None
    # The time over a link without latency counts bytes, without bytes it counts turns.
    no_latency, no_bytes = LinkSpeed(1.0, 0.0, ""), LinkSpeed(inf, 1.0, "")

    def work(point: LinkPoint) -> list[float]:
        """Count messages, and bytes that follow each other."""
        links = (no_bytes, no_latency)
        return [ring_allreduce(point.bytes, point.ranks, link) for link in links]

    latency, per_byte = fit_cost(points, work, lambda point: point.seconds).coefficients
    ranks = max(point.ranks for point in points)
    speed = 1 / per_byte if per_byte > 0 else inf
    return LinkSpeed(speed, latency, f"measured between {ranks} ranks here")


def time_allreduces(device: str) -> None:
    """Print a JSON list on the root: bytes and seconds of an all-reduce of each size.

    A calibration starts this module on several ranks by mpirun or srun.
    """
    world = worlds.enter(device=device)
    collectives = Collectives(world)
    found = []
    for number in EXCHANGED:
        tensor = torch.zeros(number, device=world.device)
        times = []
        for _ in range(EXCHANGES):
            collectives.barrier()
            begin = time.perf_counter()
            collectives.allreduce(tensor)
            accelerator.synchronize(tensor.device)
            times.append(time.perf_counter() - begin)
        # The first all-reduces set up connections.
        found.append({"bytes": 4 * number, "seconds": median(times[3:])})
    if world.is_root:
        print(json.dumps(found))
    world.close()


if __name__ == "__main__":
    time_allreduces(sys.argv[1])
