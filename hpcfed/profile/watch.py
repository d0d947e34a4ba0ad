"""The observer of a profile: a timeline of phases, spans and memory on every rank, and
some rounds and steps by kernel.

Times are seconds since all ranks met at the start of the run, so the ranks' timelines
lie over each other as closely as they left that meeting. On a GPU phases are read from
events in the stream, as the timer has them; spans of the server wait for the device at
their ends, which a run without a profile does not.
"""

import resource
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hpcfed.record.observer import Observer
from hpcfed.record.timing import Timer
from hpcfed.runtime.world import World

ROUNDS = "rounds"
"""The session that looks at rounds; the others have the names of the server's networks.
"""
PROFILER = "profiler"
"""The track of what starting and stopping a session takes; no part of the run's own
times.
"""
MOST_EVENTS = 20_000
"""Of one session in the trace, the longest first; a page that shows more would not
open.
"""
ANCHOR = "hpcfed: profiler starts"


@dataclass(frozen=True)
class Span:
    track: str
    """`phases`, `server`, `profiler`, or a kind of kernels."""
    name: str
    begin: float
    seconds: float


@dataclass(frozen=True)
class Operator:
    """A kernel on a GPU, an operator on a CPU, over a whole session."""

    name: str
    seconds: float
    """Its own, without what it calls."""
    calls: int


@dataclass(frozen=True)
class Session:
    """Some rounds or steps under torch's profiler."""

    name: str
    number: int
    """Of rounds or steps."""
    seconds: float
    busy: float
    """The share of that time in which the device (on a CPU: an operator of torch) was
    at work.
    """
    operators: list[Operator]


@dataclass
class Timeline:
    """What one rank has seen."""

    rank: int
    role: str
    host: str
    device: str
    spans: list[Span] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    """Seconds and bytes."""
    sessions: list[Session] = field(default_factory=list)
    warm: int = 0
    """Rounds that were done when the profiler had looked at some; those after them are
    warm, and alone.
    """
    paces: dict[str, float] = field(default_factory=dict)
    """Seconds of such a step of each of the server's networks."""


class ProfileWatch(Observer):
    def __init__(self, *, warmup: int, active: int, rounds: int, nvtx: bool) -> None:
        """Torch's profiler sees `active` of the rounds, and as many steps of each
        network, after `warmup` of them.

        With `nvtx` phases are ranges for Nsight, and torch's profiler stays away: a GPU
        serves one of the two.
        """
        self._warmup, self._active, self._rounds, self._nvtx = (
            warmup,
            active,
            rounds,
            nvtx,
        )
        self._laps = 0
        self._done: dict[str, int] = {}
        """Steps of the server's networks."""
        self._looked: dict[str, tuple[float, int]] = {}
        """When the profiler had looked at rounds or a network, and how many rounds or
        steps were done then.
        """
        self._open: _Recording | None = None
        self._closed: list[_Recording] = []
        self.timelines: list[Timeline] = []
        """Of all ranks; on the root, once the run has ended."""
        self.own: Timeline

    def begin(self, world: World) -> None:
        place = world.location
        self.device = world.device
        self.own = Timeline(world.rank, world.role, place.host, place.device_name)
        self._nvtx = self._nvtx and self.device.type == "cuda"
        world.barrier_all_roles()
        self._synchronize()
        self._base = time.perf_counter()
        if self.device.type == "cuda":
            self._base_event = torch.cuda.Event(enable_timing=True)
            self._base_event.record()

    def end(self, world: World, folder: Path | None) -> None:
        self._close()
        self.own.warm = self._looked[ROUNDS][1] if ROUNDS in self._looked else 0
        for recording in self._closed:
            session, spans = recording.read()
            self.own.sessions.append(session)
            self.own.spans += spans
        self.timelines = world.gather_all_roles(self.own) or []

    def timer(self, device: torch.device) -> Timer:
        return _TracedTimer(device, self)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        self._synchronize()
        self.sample_memory()
        self.push(name)
        with self._on_track("server", name):
            yield
            self._synchronize()
        if name in self._looked:
            since, done = self._looked.pop(name)
            if self._done[name] > done:
                self.own.paces[name] = (time.perf_counter() - since) / (
                    self._done[name] - done
                )
        self.pop()
        self.sample_memory()

    def step(self, network: str, done: int, steps: int) -> None:
        self._done[network] = done
        self._tick(network, done, steps)
        self.sample_memory()

    def lap(self) -> bool:
        """A round has ended; whether the profiler took time since."""
        self._laps += 1
        return self._tick(ROUNDS, self._laps, self._rounds)

    def _tick(self, name: str, done: int, whole: int) -> bool:
        """Another round or step is done; few of them leave less to warm up. True when a
        session begins or ends.
        """
        if self._open is not None and self._open.name == name:
            self._open.number += 1
            if self._open.number == self._active or done == whole:
                self._close()
                self._looked[name] = time.perf_counter(), done
                return True
        elif done < whole and done == max(
            1, min(self._warmup, whole - self._active - 1)
        ):
            self._start(name)
            return True
        return False

    def sample_memory(self) -> None:
        self.own.memory.append((time.perf_counter() - self._base, _memory(self.device)))

    def at(self, stamp: Any) -> float:
        """Seconds since the start, of a timer's stamp."""
        if self.device.type == "cuda":
            return float(self._base_event.elapsed_time(stamp)) / 1e3
        return float(stamp) - self._base

    def push(self, name: str) -> None:
        if self._nvtx:
            torch.cuda.nvtx.range_push(name)

    def pop(self) -> None:
        if self._nvtx:
            torch.cuda.nvtx.range_pop()

    def _start(self, name: str) -> None:
        self._close()
        if not self._nvtx:
            self._synchronize()
            with self._on_track(PROFILER, name):
                self._open = _Recording(name, self.device, self._base)

    def _close(self) -> None:
        """What was recorded is looked at after the run, whose times it would spoil."""
        if self._open is not None:
            self._synchronize()
            with self._on_track(PROFILER, self._open.name):
                self._open.stop()
            self._closed += [self._open] * (self._open.number > 0)
            self._open = None

    @contextmanager
    def _on_track(self, track: str, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.own.spans.append(
            Span(track, name, begin - self._base, time.perf_counter() - begin)
        )

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class _TracedTimer(Timer):
    """Keeps what a timer forgets after every round."""

    def __init__(self, device: torch.device, watch: ProfileWatch) -> None:
        self._watch, self._pushed = watch, False
        super().__init__(device)

    def lap(self) -> tuple[np.ndarray, float]:
        marks = list(self._marks)
        answer = super().lap()
        marks.append(self._marks[0])
        for (name, begin), (_, end) in pairwise(marks):
            at = self._watch.at(begin)
            self._watch.own.spans.append(
                Span("phases", name, at, self._watch.at(end) - at)
            )
        if self._watch.lap():
            self.start()  # what the profiler took is no part of the next round
        return answer

    def _mark(self, name: str) -> None:
        if self._pushed:
            self._watch.pop()
        self._watch.push(name)
        self._pushed = True
        self._watch.sample_memory()
        super()._mark(name)


class _Recording:
    """A session, open until it is stopped."""

    def __init__(self, name: str, device: torch.device, base: float) -> None:
        from torch.profiler import ProfilerActivity, profile, record_function

        self.name, self.number = name, 0
        self._cuda, self._base = device.type == "cuda", base
        kinds = (
            [ProfilerActivity.CPU, ProfilerActivity.CUDA]
            if self._cuda
            else [ProfilerActivity.CPU]
        )
        self._profiler = profile(activities=kinds)
        warnings.filterwarnings(
            "ignore", "(Warning: )?Profiler clears events"
        )  # a session has one cycle
        self._profiler.start()
        self._began = time.perf_counter()
        with record_function(ANCHOR):
            pass

    def stop(self) -> None:
        self._seconds = time.perf_counter() - self._began
        self._profiler.stop()

    def read(self) -> tuple[Session, list[Span]]:
        """Kineto's events as they are: torch's own objects for them would take a minute
        for some rounds on a CPU.
        """
        kineto: Any = self._profiler.profiler
        raw = kineto.kineto_results.events()
        raw = [
            e for e in raw if _on_host(e) or not e.is_user_annotation()
        ]  # ranges around kernels are no kernels
        events = [
            _Event(e.name(), e.start_ns(), e.duration_ns(), self._track(e)) for e in raw
        ]
        shift = (
            self._began
            - self._base
            - next(e.start for e in events if e.name == ANCHOR) / 1e9
        )
        events = [
            event for event in events if event.length > 0 and event.name != ANCHOR
        ]
        own = [
            event
            for event in events
            if event.track.startswith("kernels" if self._cuda else "operators")
        ]
        busy = covered(
            [
                (e.start / 1e9, (e.start + e.length) / 1e9)
                for e in own
                if self._cuda or "::" in e.name
            ]
        )
        longest = sorted(events, key=lambda event: -event.length)[:MOST_EVENTS]
        spans = [
            Span(e.track, e.name, e.start / 1e9 + shift, e.length / 1e9)
            for e in longest
        ]
        return Session(
            self.name, self.number, self._seconds, busy / self._seconds, operators(own)
        ), spans

    def _track(self, event: Any) -> str:
        if _on_host(event):
            return f"operators, thread {event.start_thread_id()}"
        return f"kernels, stream {event.device_resource_id()}"


def _on_host(event: Any) -> bool:
    return bool(event.device_type() == torch.autograd.DeviceType.CPU)


class _Event(NamedTuple):
    name: str
    start: int
    """Nanoseconds, as the length."""
    length: int
    track: str


def operators(events: Sequence[_Event]) -> list[Operator]:
    """By name, the longest first; an operator that calls others counts without them."""
    own: dict[str, int] = defaultdict(int)
    calls: dict[str, int] = defaultdict(int)
    open_ones: dict[str, list[_Event]] = defaultdict(list)
    for event in sorted(events, key=lambda e: (e.start, -e.length)):
        above = open_ones[event.track]
        while above and event.start >= above[-1].start + above[-1].length:
            above.pop()
        if above:
            own[above[-1].name] -= event.length
        own[event.name] += event.length
        calls[event.name] += 1
        above.append(event)
    return [
        Operator(name, own[name] / 1e9, calls[name])
        for name in sorted(own, key=lambda name: -own[name])
    ]


def covered(intervals: list[tuple[float, float]]) -> float:
    """The length of their union."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _memory(device: torch.device) -> int:
    """Bytes now: of the device's allocator on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def trace(timelines: list[Timeline]) -> dict[str, Any]:
    """All ranks in the form that Perfetto and Chrome open: a process for every rank, a
    thread for every track.
    """
    events: list[dict[str, Any]] = []
    for line in timelines:
        title = f"rank {line.rank}, {line.role}, {line.device} on {line.host}"
        events.append(
            {
                "ph": "M",
                "name": "process_name",
                "pid": line.rank,
                "args": {"name": title},
            }
        )
        events.append(
            {
                "ph": "M",
                "name": "process_sort_index",
                "pid": line.rank,
                "args": {"sort_index": line.rank},
            }
        )
        tracks = {
            name: number
            for number, name in enumerate(
                dict.fromkeys(span.track for span in line.spans)
            )
        }
        for name, number in tracks.items():
            events.append(
                {
                    "ph": "M",
                    "name": "thread_name",
                    "pid": line.rank,
                    "tid": number,
                    "args": {"name": name},
                }
            )
        for span in line.spans:
            place = {
                "pid": line.rank,
                "tid": tracks[span.track],
                "ts": 1e6 * span.begin,
                "dur": 1e6 * span.seconds,
            }
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": span.track.partition(",")[0],
                    **place,
                }
            )
        for at, used in line.memory:
            value = {"MiB": used / 2**20}
            events.append(
                {
                    "ph": "C",
                    "name": "memory",
                    "pid": line.rank,
                    "ts": 1e6 * at,
                    "args": value,
                }
            )
    return {"displayTimeUnit": "ms", "traceEvents": events}
