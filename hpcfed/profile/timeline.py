"""What each rank recorded during a profiled run, and the two files made from it.
trace.json has every span, in the format of Perfetto and Chrome. profile.json has lanes,
coarse enough for a page, since a long run has too many spans to draw.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcfed.results.profiles import Lane, Session

PROFILER = "profiler"
"""The track of starting and stopping a session, which is not the run's own time."""


MOMENTS = 400
"""Number of pieces that the whole time is cut into."""
TRACKS = ("phases", "server", PROFILER)
"""Tracks that make up a lane, outer ones first. Others are kernels and operators."""


@dataclass(frozen=True)
class Span:
    """A named interval, in seconds from the start of the run."""

    track: str
    """`phases`, `server`, `profiler`, or a kind of kernels."""
    name: str
    begin: float
    seconds: float


@dataclass
class Timeline:
    """Spans, memory and sessions of one rank."""

    rank: int
    role: str
    host: str
    device: str
    spans: list[Span] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    """Seconds and bytes."""
    sessions: list[Session] = field(default_factory=list)
    warm: int = 0
    """Rounds done when the profiler had recorded enough; later ones are warm."""
    paces: dict[str, float] = field(default_factory=dict)
    """Seconds per warm step of each of the server's networks."""


def lanes(timelines: Sequence[Timeline]) -> list[list[Lane]]:
    """Return what took most of each moment, for each rank."""
    end = 0.0
    for line in timelines:
        for span in line.spans:
            if span.track in TRACKS:
                end = max(end, span.begin + span.seconds)
    return [_of_rank(line, end / MOMENTS) for line in timelines]


def _of_rank(line: Timeline, moment: float) -> list[Lane]:
    found: list[Lane] = []
    # Without times, for example if a run failed at once, there is nothing to cut.
    for number, name in enumerate(_names(line, moment) if moment > 0 else ()):
        begin, end = number * moment, (number + 1) * moment
        if found and (found[-1].name, found[-1].end) == (name, begin):
            begin = found.pop().begin
        if name:
            found.append(Lane(name, begin, end))
    return found


def _names(line: Timeline, moment: float) -> list[str]:
    """Return what took most of each moment; empty if the rank was idle."""
    names = [""] * MOMENTS
    # A later track lies within an earlier one: the server's parts within its phase, and
    # the profiler's overhead within either.
    for track in TRACKS:
        took: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(MOMENTS))
        for span in line.spans:
            if span.track == track:
                end = span.begin + span.seconds
                name = PROFILER if track == PROFILER else span.name
                took[name] += _shares(span.begin / moment, end / moment)
        for number in np.flatnonzero(sum(took.values()) >= 0.5) if took else ():
            names[number] = max(took, key=lambda name: float(took[name][number]))
    return names


def _shares(begin: float, end: float) -> np.ndarray:
    """Return the share of each moment between two times, given in moments."""
    starts = np.arange(MOMENTS)
    inside = np.minimum(starts + 1, end) - np.maximum(starts, begin)
    shares: np.ndarray = inside.clip(0, 1)
    return shares


def trace(timelines: list[Timeline]) -> dict[str, Any]:
    """Return the trace: a process for every rank, a thread for every track."""
    events: list[dict[str, Any]] = []
    for line in timelines:
        # Tracks are numbered by first appearance.
        names = dict.fromkeys(span.track for span in line.spans)
        tracks = {name: number for number, name in enumerate(names)}
        events += _metadata(line, tracks)
        events += _slices(line, tracks)
        events += _counters(line)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _metadata(line: Timeline, tracks: dict[str, int]) -> list[dict[str, Any]]:
    """Return the names of a rank's process and of its threads."""
    # "M" is metadata; the sort index makes viewers show ranks in order.
    title = f"rank {line.rank}, {line.role}, {line.device} on {line.host}"
    event = {"ph": "M", "pid": line.rank}
    events: list[dict[str, Any]] = [
        event | {"name": "process_name", "args": {"name": title}},
        event | {"name": "process_sort_index", "args": {"sort_index": line.rank}},
    ]
    for name, number in tracks.items():
        thread = {"name": "thread_name", "tid": number, "args": {"name": name}}
        events.append(event | thread)
    return events


def _slices(line: Timeline, tracks: dict[str, int]) -> list[dict[str, Any]]:
    """Return a complete event ("X") for every span; times are in microseconds."""
    return [
        {
            "ph": "X",
            "name": span.name,
            # "kernels, stream 7" and the like belong to one category.
            "cat": span.track.partition(",")[0],
            "pid": line.rank,
            "tid": tracks[span.track],
            "ts": 1e6 * span.begin,
            "dur": 1e6 * span.seconds,
        }
        for span in line.spans
    ]


def _counters(line: Timeline) -> list[dict[str, Any]]:
    """Return a counter event ("C") for each memory sample."""
    return [
        {
            "ph": "C",
            "name": "memory",
            "pid": line.rank,
            "ts": 1e6 * seconds,
            "args": {"MiB": used / 2**20},
        }
        for seconds, used in line.memory
    ]
