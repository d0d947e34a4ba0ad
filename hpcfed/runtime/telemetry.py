"""Telemetry: what the GPUs, processes, hosts and networks of a run do over time.

A thread of each rank reads counters once a second. It has none of the run's other
threads to join: those that watch for stalls or leave signs of life must not wait for a
driver that hangs.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from math import nan
from typing import Protocol

import numpy as np

from hpcfed.runtime import host_counters
from hpcfed.runtime.gpu_counters import GpuCounters, gpu_counters, told
from hpcfed.runtime.history import History, Series
from hpcfed.runtime.stalls import Clock
from hpcfed.runtime.world import World, is_first_of_device, is_first_of_host

SHARE = 0.002
"""The share of a core that readings may take: if they are slow, they become rarer."""
COLLECT = 10
"""Ranks send their moments to the root after this many new ones."""
LEAST_COLLECT = 10.0
"""Seconds between two such times, at least."""
PATIENCE = 2.0
"""Seconds to wait for a reading at the end: a driver may hang."""


Values = dict[Series, float]


class SampledSource(Protocol):
    """Something that can be read at any time."""

    def counters(self) -> Values:
        """Return numbers that only grow; their growth per second is sampled."""

    def gauges(self) -> Values:
        """Return numbers of this moment."""


class GpuSource:
    """The GPU of a rank, which reports it also for ranks that share it."""

    def __init__(self, rank: int, counters: GpuCounters) -> None:
        self._rank, self._counters = str(rank), counters

    def counters(self) -> Values:
        return {Series("gpu_power", self._rank): told(self._counters.joules)}

    def gauges(self) -> Values:
        asked = self._counters
        return {
            Series("gpu_busy", self._rank): told(asked.busy),
            Series("gpu_memory", self._rank): told(asked.memory),
            Series("gpu_temperature", self._rank): told(asked.temperature),
        }


class ProcessSource:
    """This process."""

    def __init__(self, rank: int) -> None:
        self._rank = str(rank)

    def counters(self) -> Values:
        return {Series("process_cpu", self._rank): host_counters.process_cpu()}

    def gauges(self) -> Values:
        memory = host_counters.process_memory()
        return {Series("process_memory", self._rank): _or_nan(memory)}


class HostSource:
    """A host and its network, which the host's first rank reports."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._links = host_counters.busiest(host_counters.traffic())

    def counters(self) -> Values:
        worked = host_counters.host_cpu()
        found = {Series("host_cpu", self._host): _or_nan(worked)}
        moved = host_counters.traffic() if self._links else {}
        for name in self._links:
            received, sent = moved.get(name, (nan, nan))
            owner = f"{self._host} {name}"
            found[Series("received", owner)] = received
            found[Series("sent", owner)] = sent
        return found

    def gauges(self) -> Values:
        memory = host_counters.host_memory()
        return {Series("host_memory", self._host): _or_nan(memory)}


def _or_nan(value: float | None) -> float:
    return nan if value is None else value


def sources_of(world: World) -> list[SampledSource]:
    """Return what this rank reads: what is shared, its first rank reads."""
    here = world.location
    found: list[SampledSource] = [ProcessSource(world.rank)]
    if is_first_of_host(world):
        found.append(HostSource(here.host))
    counters = None
    if here.device != "cpu" and is_first_of_device(world):
        counters = gpu_counters(here.device)
    if counters is not None:
        found.append(GpuSource(world.rank, counters))
    return found


class Sampler:
    """Reads this rank's sources again and again."""

    def __init__(
        self,
        sources: Sequence[SampledSource],
        every: float,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        """The history begins now, with moments of `every` seconds."""
        self.began = time.time()
        """On the host's clock."""
        self.every = every
        self._sources = sources
        self._clock = clock
        self._zero = clock()
        self._last = 0.0
        """When it last read, in seconds since the start."""
        self._counted = self._read_counters()
        self._history = History([*self._counted, *self._read_gauges()], every)
        self._latest: Values = {}
        self._lock = threading.Lock()
        self._rounds = 0
        self._collected: dict[int, bool] = {}
        self._next_collection = LEAST_COLLECT

    @contextmanager
    def sampling(self) -> Iterator["Sampler"]:
        """Read within the block, in a thread."""
        over = threading.Event()
        # A daemon, because a driver may hang.
        thread = threading.Thread(
            target=self._go_on, args=(over,), name="telemetry", daemon=True
        )
        thread.start()
        try:
            yield self
        finally:
            over.set()
            thread.join(PATIENCE)

    def _go_on(self, over: threading.Event) -> None:
        pause = self.every
        while not over.wait(pause):
            pause = self.pause_after(self.look())

    def pause_after(self, took: float) -> float:
        """Return the seconds to wait after a reading that took these CPU seconds."""
        return max(self.every, took / SHARE)

    def look(self) -> float:
        """Read everything once; return the CPU seconds that it took."""
        begin = time.thread_time()
        counted, values = self._read_counters(), self._read_gauges()
        now = self._clock() - self._zero
        length = now - self._last
        for series, count in counted.items():
            growth = count - self._counted[series]
            # A counter that was reset tells nothing.
            values[series] = growth / length if growth >= 0 else nan
        row = np.array([values[series] for series in self._history.series])
        # Only now: a driver that hangs must not hold up who wants the history.
        with self._lock:
            self._history.add(self._last, now, row, self._rounds)
            took = time.thread_time() - begin
            self._history.cost += took
        self._counted, self._latest, self._last = counted, values, now
        return took

    def note_rounds(self, done: int) -> None:
        """Note how many rounds are done."""
        self._rounds = done

    def latest(self) -> dict[str, float]:
        """Return the last values of this rank and its host, by figure; none before the
        first reading.
        """
        return {series.figure: value for series, value in self._latest.items()}

    def history(self) -> History:
        """Return a copy of what was read so far; without moments before the first
        reading.
        """
        with self._lock:
            copied = deepcopy(self._history)
        # Rounds may have ended since the last reading.
        copied.rounds[-1:] = self._rounds
        return copied

    def is_due(self, round: int) -> bool:
        """Tell whether the root should collect everyone's moments after this round; all
        runs that advance together get the same answer.
        """
        if round not in self._collected:
            due = self._last >= self._next_collection
            if due:
                pause = max(LEAST_COLLECT, COLLECT * self._history.step)
                self._next_collection = self._last + pause
            # Only of the last rounds: stacked runs may be some apart.
            self._collected = {
                past: answer
                for past, answer in self._collected.items()
                if past > round - 10
            }
            self._collected[round] = due
        return self._collected[round]

    def _read_counters(self) -> Values:
        found: Values = {}
        for source in self._sources:
            found |= source.counters()
        return found

    def _read_gauges(self) -> Values:
        found: Values = {}
        for source in self._sources:
            found |= source.gauges()
        return found


@contextmanager
def sampling(
    world: World,
    every: float,
    sources: Callable[[World], Sequence[SampledSource]] = sources_of,
) -> Iterator[Sampler | None]:
    """Sample within the block, every so many seconds; 0: not at all. All ranks of the
    role call it, and begin together.
    """
    if not every:
        yield None
        return
    found = sources(world)
    world.role_barrier()
    with Sampler(found, every).sampling() as sampler:
        yield sampler
