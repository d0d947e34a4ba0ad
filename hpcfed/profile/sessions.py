"""Sessions of torch's profiler: recorded during the run, read after it."""

import time
import warnings
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hpcfed.profile.timeline import Span
from hpcfed.results.profiles import Operator, Session

MOST_EVENTS = 20_000
"""Most events of one session in the trace, longest first; a page with more would not
open.
"""
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
        self._cuda = device.type == "cuda"
        self._base = base
        activities = [ProfilerActivity.CPU]
        if self._cuda:
            activities.append(ProfilerActivity.CUDA)
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
        kind = "kernels" if self._cuda else "operators"
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
        """Return Kineto's raw events. Torch's own objects for them would take a minute
        for a few rounds on a CPU.
        """
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
            if self._cuda or "::" in event.name:
                intervals.append((event.start / 1e9, event.stop / 1e9))
        return covered(intervals)


def _on_host(event: Any) -> bool:
    return bool(event.device_type() == torch.autograd.DeviceType.CPU)


def _track(event: Any) -> str:
    if _on_host(event):
        return f"operators, thread {event.start_thread_id()}"
    return f"kernels, stream {event.device_resource_id()}"


def operators(events: Sequence[Event]) -> list[Operator]:
    """Return the time and calls of each name, longest first; the time of an operator
    excludes the operators it calls.
    """
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
