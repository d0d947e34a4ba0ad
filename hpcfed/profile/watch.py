"""The observer of a profile: a timeline of phases, spans and memory on each rank, and a
few rounds and steps by kernel.

Times are seconds since all ranks met at a barrier at the start of the run, so the
ranks' timelines agree as closely as the ranks left that barrier. On a GPU, phases come
from events in the stream, as in the timer. Spans of the server wait for the device at
their ends; a run without a profile does not.
"""

import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hpcfed.profile.timeline import PROFILER, Span, Timeline
from hpcfed.results.profiles import ROUNDS, Operator, Session
from hpcfed.runtime import accelerator
from hpcfed.runtime.host_counters import process_memory
from hpcfed.runtime.timer import Observer, Timer
from hpcfed.runtime.world import World

MOST_EVENTS = 20_000
"""Most events of a session in the trace: a page with more would not open."""
ANCHOR = "hpcfed: profiler starts"
"""An event whose time is known on both clocks, Kineto's and ours."""


class Event(NamedTuple):
    """A kernel or operator; times are in nanoseconds."""

    name: str
    start: int
    length: int
    track: str

    @property
    def stop(self) -> int:
        return self.start + self.length


class Recording:
    """A session that records until it is stopped."""

    def __init__(self, name: str, device: torch.device, base: float) -> None:
        """`base` is the start of the run on the clock of `time.perf_counter`."""
        from torch.profiler import ProfilerActivity, profile, record_function

        self.name, self.number = name, 0
        self._gpu = accelerator.is_gpu(device)
        self._base = base
        activities = [ProfilerActivity.CPU]
        if self._gpu:
            activities.append(getattr(ProfilerActivity, device.type.upper()))
        self._profiler = profile(activities=activities)
        # This warning is for profiles of several cycles; a session has one.
        warnings.filterwarnings("ignore", "(Warning: )?Profiler clears events")
        self._profiler.start()
        self._began = time.perf_counter()
        with record_function(ANCHOR):
            pass

    def stop(self) -> None:
        """End the session."""
        self._seconds = time.perf_counter() - self._began
        self._profiler.stop()

    def read(self) -> tuple[Session, list[Span]]:
        """Return what was recorded, and the longest events as spans of the timeline."""
        # On a GPU, count kernels: operators only launch them.
        kind = "kernels" if self._gpu else "operators"
        shift = 0.0
        events, counted = [], []
        for event in self._events():
            if event.name == ANCHOR:
                # Convert from Kineto's clock to seconds since the start of the run.
                shift = self._began - self._base - event.start / 1e9
            elif event.length > 0:
                events.append(event)
                if event.track.startswith(kind):
                    counted.append(event)
        session = Session(
            name=self.name,
            number=self.number,
            seconds=self._seconds,
            busy=self._busy_seconds(counted) / self._seconds,
            operators=operators(counted),
        )
        spans = []
        longest = sorted(events, key=lambda event: -event.length)
        for event in longest[:MOST_EVENTS]:
            begin = event.start / 1e9 + shift
            length = event.length / 1e9
            spans.append(Span(event.track, event.name, begin, length))
        return session, spans

    def _events(self) -> list[Event]:
        """Return Kineto's raw events: making torch's own objects takes a minute."""
        kineto: Any = self._profiler.profiler
        events = []
        for raw in kineto.kineto_results.events():
            # On the device, annotations are ranges around kernels, not kernels.
            if not _on_host(raw) and raw.is_user_annotation():
                continue
            event = Event(
                name=raw.name(),
                start=raw.start_ns(),
                length=raw.duration_ns(),
                track=_track(raw),
            )
            events.append(event)
        return events

    def _busy_seconds(self, events: Sequence[Event]) -> float:
        """Return how long a kernel was running, or on a CPU an operator of torch."""
        intervals = []
        for event in events:
            # On a CPU, names with "::" are operators; others are ranges around them.
            if self._gpu or "::" in event.name:
                intervals.append((event.start / 1e9, event.stop / 1e9))
        return covered(intervals)


def _on_host(event: Any) -> bool:
    return bool(event.device_type() == torch.autograd.DeviceType.CPU)


def _track(event: Any) -> str:
    if _on_host(event):
        return f"operators, thread {event.start_thread_id()}"
    return f"kernels, stream {event.device_resource_id()}"


def operators(events: Sequence[Event]) -> list[Operator]:
    """Return time and calls of each name, longest first, without what it calls."""
    times: dict[str, int] = defaultdict(int)
    calls: dict[str, int] = defaultdict(int)
    callers: dict[str, list[Event]] = defaultdict(list)
    # Sorted by start with longer ones first, callers come before what they call.
    for event in sorted(events, key=lambda e: (e.start, -e.length)):
        stack = callers[event.track]
        while stack and event.start >= stack[-1].stop:
            stack.pop()
        if stack:
            # The callee's time counts for itself, not for its caller.
            times[stack[-1].name] -= event.length
        times[event.name] += event.length
        calls[event.name] += 1
        stack.append(event)
    found = []
    for name, nanoseconds in times.items():
        seconds = nanoseconds / 1e9
        operator = Operator(name=name, seconds=seconds, calls=calls[name])
        found.append(operator)
    return sorted(found, key=lambda operator: -operator.seconds)


def covered(intervals: list[tuple[float, float]]) -> float:
    """Return the length of the intervals' union."""
    total = 0.0
    reached = float("-inf")
    for begin, end in sorted(intervals):
        # Streams and threads overlap: skip what was already counted.
        uncounted = end - max(begin, reached)
        total += max(0.0, uncounted)
        reached = max(reached, end)
    return total


class ProfileWatch(Observer):
    """Records a rank's timeline, and profiles a few rounds and steps with torch."""

    def __init__(self, *, warmup: int, active: int, rounds: int, nvtx: bool) -> None:
        """Torch's profiler records `active` of the rounds, and the same number of steps
        of each network, after `warmup` of them.

        With `nvtx`, phases are ranges for Nsight, and torch's profiler is off: a GPU
        serves only one of the two.
        """
        # Rounds and steps are counted alike, so the same limits apply to both.
        self._warmup = warmup
        self._active = active
        self._rounds = rounds
        self._nvtx = nvtx
        self._rounds_done = 0
        self._steps_done: dict[str, int] = {}
        """Steps of the server's networks."""
        self._looked: dict[str, tuple[float, int]] = {}
        """When the profiler finished with rounds or a network, and its count then."""
        self._open: Recording | None = None
        self._closed: list[Recording] = []
        self.timelines: list[Timeline] = []
        """Timelines of all ranks; only on the root, after the run."""
        self.timeline: Timeline
        """This rank's timeline."""

    def begin(self, world: World) -> None:
        location = world.location
        self.device = world.device
        self.timeline = Timeline(
            world.rank, world.role, location.host, location.device_name
        )
        self._nvtx = self._nvtx and self.device.type == "cuda"
        # All ranks start their clocks here: host clocks of several nodes differ.
        world.barrier_all_roles()
        self._synchronize()
        self._base = time.perf_counter()
        if accelerator.is_gpu(self.device):
            self._base_event = accelerator.time_stamps(self.device)()
            self._base_event.record()

    def end(self, world: World, folder: Path | None) -> None:
        # A stopped run may leave a session open.
        self._close()
        if ROUNDS in self._looked:
            self.timeline.warm = self._looked[ROUNDS][1]
        for recording in self._closed:
            session, spans = recording.read()
            self.timeline.sessions.append(session)
            self.timeline.spans += spans
        self.timelines = world.gather_all_roles(self.timeline) or []

    def timer(self, device: torch.device) -> Timer:
        return _TracedTimer(device, self)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        self._synchronize()
        self.sample_memory()
        self.push(name)
        with self._on_track("server", name):
            yield
            # Kernels that are still running belong to the span.
            self._synchronize()
        self._note_pace(name)
        self.pop()
        self.sample_memory()

    def _note_pace(self, network: str) -> None:
        """Record the pace of the steps after those that the profiler has recorded."""
        if network not in self._looked:
            return
        since, done = self._looked.pop(network)
        steps = self._steps_done[network] - done
        if steps > 0:
            self.timeline.paces[network] = (time.perf_counter() - since) / steps

    def step(self, network: str, done: int, steps: int) -> None:
        self._steps_done[network] = done
        self._tick(network, done, steps)
        self.sample_memory()

    def lap(self) -> bool:
        """Count a finished round; return whether the profiler has taken time since."""
        self._rounds_done += 1
        return self._tick(ROUNDS, self._rounds_done, self._rounds)

    def _tick(self, name: str, done: int, whole: int) -> bool:
        """Count another round or step; return whether a session begins or ends."""
        if self._open is not None and self._open.name == name:
            self._open.number += 1
            if self._open.number == self._active or done == whole:
                self._close()
                self._looked[name] = time.perf_counter(), done
                return True
            return False
        # With few rounds or steps, warm up with fewer, so that one is left to record.
        start = max(1, min(self._warmup, whole - self._active - 1))
        if done == start and done < whole:
            self._start(name)
            return True
        return False

    def sample_memory(self) -> None:
        """Record the memory in use now, if it is known."""
        seconds, used = time.perf_counter() - self._base, _memory(self.device)
        if used is not None:
            self.timeline.memory.append((seconds, used))

    def at(self, stamp: Any) -> float:
        """Return a timer's stamp as seconds since the start."""
        if accelerator.is_gpu(self.device):
            return float(self._base_event.elapsed_time(stamp)) / 1e3
        return float(stamp) - self._base

    def push(self, name: str) -> None:
        """Begin a range for Nsight."""
        if self._nvtx:
            accelerator.begin_range(name)

    def pop(self) -> None:
        """End the last range for Nsight."""
        if self._nvtx:
            accelerator.end_range()

    def _start(self, name: str) -> None:
        # Torch has one profiler per process: rounds and steps cannot be recorded at
        # once.
        self._close()
        if not self._nvtx:
            self._synchronize()
            with self._on_track(PROFILER, name):
                self._open = Recording(name, self.device, self._base)

    def _close(self) -> None:
        """End the session. It is read after the run, so that the run is not slowed."""
        if self._open is None:
            return
        self._synchronize()
        with self._on_track(PROFILER, self._open.name):
            self._open.stop()
        if self._open.number > 0:
            self._closed.append(self._open)
        self._open = None

    @contextmanager
    def _on_track(self, track: str, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        seconds = time.perf_counter() - begin
        span = Span(track, name, begin - self._base, seconds)
        self.timeline.spans.append(span)

    def _synchronize(self) -> None:
        accelerator.synchronize(self.device)


class _TracedTimer(Timer):
    """A timer that copies its marks to the timeline before it clears them."""

    def __init__(self, device: torch.device, watch: ProfileWatch) -> None:
        self._watch = watch
        self._pushed = False
        super().__init__(device)

    def lap(self) -> tuple[np.ndarray, float]:
        # The timer starts a new list of marks with each round.
        marks = list(self._marks)
        answer = super().lap()
        # The first mark of the next round ends the last phase of this one.
        marks.append(self._marks[0])
        for (name, begin), (_, end) in pairwise(marks):
            seconds = self._watch.at(begin)
            length = self._watch.at(end) - seconds
            span = Span("phases", name, seconds, length)
            self._watch.timeline.spans.append(span)
        # Time for starting or stopping the profiler does not belong to the next round.
        if self._watch.lap():
            self.start()
        return answer

    def _mark(self, name: str, at: Any = None) -> None:
        # Ranges for Nsight follow each other: a phase begins where another ends.
        if self._pushed:
            self._watch.pop()
        self._watch.push(name)
        self._pushed = True
        self._watch.sample_memory()
        super()._mark(name, at)


def _memory(device: torch.device) -> int | None:
    """Return the bytes in use now: torch's on a GPU, the process's on a CPU; None if
    unknown.
    """
    if accelerator.is_gpu(device):
        return accelerator.allocated_memory(device)
    known = process_memory()
    return None if known is None else int(known)
