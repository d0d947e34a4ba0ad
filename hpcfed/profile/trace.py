"""trace.json: the timelines of all ranks in the form that Perfetto and Chrome open."""

from typing import Any

from hpcfed.profile.timeline import Timeline


def trace(timelines: list[Timeline]) -> dict[str, Any]:
    """Return the trace: a process for every rank, a thread for every track."""
    events: list[dict[str, Any]] = []
    for line in timelines:
        # Tracks are numbered in the order in which they first appear.
        names = dict.fromkeys(span.track for span in line.spans)
        tracks = {name: number for number, name in enumerate(names)}
        events += _metadata(line, tracks)
        events += _slices(line, tracks)
        events += _counters(line)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _metadata(line: Timeline, tracks: dict[str, int]) -> list[dict[str, Any]]:
    """Return the names of a rank's process and of its threads."""
    # "M" is metadata; the sort index has viewers show ranks in order.
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
    events = []
    for span in line.spans:
        event = {
            "ph": "X",
            "name": span.name,
            # "kernels, stream 7" and others like it are of one category.
            "cat": span.track.partition(",")[0],
            "pid": line.rank,
            "tid": tracks[span.track],
            "ts": 1e6 * span.begin,
            "dur": 1e6 * span.seconds,
        }
        events.append(event)
    return events


def _counters(line: Timeline) -> list[dict[str, Any]]:
    """Return a counter event ("C") for every look at memory."""
    events = []
    for seconds, used in line.memory:
        event = {
            "ph": "C",
            "name": "memory",
            "pid": line.rank,
            "ts": 1e6 * seconds,
            "args": {"MiB": used / 2**20},
        }
        events.append(event)
    return events
