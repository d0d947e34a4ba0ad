"""Settings, rounds and clocks that several benchmarks share."""

import gc
import math
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch

from hpcfed import methods
from hpcfed.experiment.assemble import Setup, assemble
from hpcfed.federation.log import RoundLog
from hpcfed.options import Settings, resolve
from hpcfed.runtime.timer import Timer
from hpcfed.runtime.world import World


def settings_of(values: dict[str, Any]) -> Settings:
    """Return the settings of a run with these options, of FedAvg unless they name a
    method.
    """
    # Sources are for messages about mistakes, of which there are none.
    sources = {name: name for name in values}
    method = methods.load(values.get("method", "fedavg"))
    return resolve(values, sources, method.Options)


def setup_of(values: dict[str, Any], world: World) -> Setup:
    """Assemble a run with these options, of FedAvg unless they name a method."""
    return assemble(settings_of(values), world, Timer(world.device))


def rounds_of(setup: Setup) -> Callable[[int], RoundLog]:
    """Return a function that does the next round and returns its log."""
    fed = setup.federation
    state = setup.method.init(fed)

    def one(round: int) -> RoundLog:
        nonlocal state
        cohort = fed.sample(round)
        state = setup.method.round(fed, state, cohort)
        return cohort.log

    return one


LEAST = 3
"""Rounds that are counted, however long they take."""


def milliseconds(
    work: Callable[[int], object],
    device: torch.device,
    *,
    rounds: int,
    warmup: int = 3,
    until: float = math.inf,
) -> np.ndarray:
    """Return the milliseconds of each round of work, without those that warm up. No
    round begins after `until`, on time.perf_counter, once there are a few.
    """
    seconds: list[float] = []
    for round in range(warmup + rounds):
        if len(seconds) >= warmup + LEAST and time.perf_counter() > until:
            break
        begin = time.perf_counter()
        work(round)
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return 1e3 * np.array(seconds[warmup:])


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a piece of work, until the device has done it."""
    synchronize(device)
    begin = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - begin


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done its work, so that a clock counts all of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free() -> None:
    """Give back memory that nothing uses any more: it must not count for what comes next."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where CUDA has not started


def headline(world: World, *more: str) -> str:
    """Return the first line of what a program prints: the date, what it runs on, and more."""
    versions = [f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    words = [world.locations[0].device_name, *versions, *more]
    return f"{datetime.now(UTC):%Y-%m-%d}  {', '.join(words)}"
