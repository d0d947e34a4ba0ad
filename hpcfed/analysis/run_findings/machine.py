"""What GPUs, processes, hosts and networks did during a run: telemetry in a few lines."""

from collections.abc import Iterator, Sequence

import numpy as np

from hpcfed.analysis.findings import BYTES, SHARE, Cell, Kind, Table
from hpcfed.errors import count
from hpcfed.results.run import RunRecord
from hpcfed.results.signs import RunSign
from hpcfed.results.telemetry import Telemetry
from hpcfed.words import bytes_text, formatted, number, short_seconds, time_text

CORES = Kind("1", formatted(".2f"))
WATTS = Kind("W", number)
DEGREES = Kind("°C", number)
SPEED = Kind("bytes/s", lambda speed: f"{bytes_text(speed)}/s")
TINY = Kind("fraction", formatted(".2%"))
SHOWN = {
    "gpu_busy": ("GPU at work", SHARE),
    "gpu_power": ("its power, W", WATTS),
    "gpu_memory": ("its memory in use", BYTES),
    "gpu_temperature": ("its °C", DEGREES),
    "process_cpu": ("cores of a rank", CORES),
    "process_memory": ("memory of a rank", BYTES),
    "host_cpu": ("cores of a host", CORES),
    "host_memory": ("memory of a host", BYTES),
}
"""Columns, by their figures."""
LOOPBACK = "lo"
"""The interface by which programs of one host talk to each other."""
UNTOLD = {
    "gpu_busy": "whether GPUs work",
    "gpu_power": "the power of GPUs",
    "gpu_memory": "the memory of GPUs in use",
    "gpu_temperature": "the temperature of GPUs",
    "process_memory": "the memory of processes (/proc/self/statm)",
    "host_cpu": "the cores of hosts (/proc/stat)",
    "host_memory": "the memory of hosts (/proc/meminfo)",
    "received": "traffic of networks (/proc/net/dev, or no interface had any)",
}
"""What a reader misses without a figure; what is sent comes with what is received."""


def of_machine(record: RunRecord, telemetry: Telemetry | None) -> Iterator[Table]:
    """Yield means and largest values, over time and over all ranks or hosts."""
    if telemetry is None or not len(telemetry):
        return
    columns: list[str] = ["the machine"]
    means: list[str | Cell] = ["mean"]
    highest: list[str | Cell] = ["most"]
    for name, (title, kind) in SHOWN.items():
        if name in telemetry.figures:
            columns.append(title)
            values = telemetry.figures[name]
            means.append(kind(mean_of(telemetry, values)))
            highest.append(kind(float(np.nanmax(values))))
    link = busiest_link(telemetry)
    if link is not None:
        for name in ("received", "sent"):
            values = telemetry.of(name)[:, link : link + 1]
            columns.append(f"{telemetry.owners['link'][link]} {name}")
            means.append(SPEED(mean_of(telemetry, values)))
            highest.append(SPEED(float(np.nanmax(values))))
    yield Table(columns, [means, highest], caption(record, telemetry))


def machine_text(sign: RunSign) -> str:
    """Say what the first rank's GPU, process and host do now; empty if unknown."""
    told = []
    for name, (title, kind) in SHOWN.items():
        value = sign.machine.get(name)
        if value is not None:
            told.append(f"{title} {kind(value)}")
    return f"rank 0: {' · '.join(told)}" if told else ""


def mean_of(telemetry: Telemetry, values: np.ndarray) -> float:
    """Return the mean over time and owners: [moments, owners]."""
    weights = np.where(np.isfinite(values), telemetry.moments["seconds"][:, None], 0.0)
    return float((np.nan_to_num(values) * weights).sum() / weights.sum())


def busiest_link(telemetry: Telemetry) -> int | None:
    """Return the interface that moved most, other than the loopback; None if no other
    moved anything.
    """
    most, found = 0.0, None
    moved = np.nan_to_num(telemetry.of("received")) + np.nan_to_num(
        telemetry.of("sent")
    )
    for place, name in enumerate(telemetry.owners["link"]):
        total = float(moved[:, place].sum())
        if total > most and name.split()[-1] != LOOPBACK:
            most, found = total, place
    return found


def caption(record: RunRecord, telemetry: Telemetry) -> str:
    """Say how it was sampled, what it cost, where gaps are, and what is missing."""
    seconds = telemetry.moments["seconds"]
    told = [
        f"means over {count(len(seconds), 'moment')} of at most "
        f"{short_seconds(float(seconds.max()))}, of all ranks, hosts and programs"
    ]
    share = telemetry.cost.max(initial=0.0) / seconds.sum()
    told.append(f"sampling took {TINY(float(share))} of a core of a rank")
    told += gaps_text(telemetry)
    missing = missing_text(record, telemetry)
    return "; ".join([*told, missing] if missing else told)


def gaps_text(telemetry: Telemetry) -> list[str]:
    """Say for how long a run did not run before it was resumed, and where."""
    told = []
    for first in resumptions(telemetry):
        last = first - 1
        until = telemetry.moments["began"][last] + telemetry.moments["seconds"][last]
        gap = float(telemetry.moments["began"][first] - until)
        rounds = int(telemetry.moments["rounds"][last])
        told.append(f"a gap of {time_text(gap)} after round {rounds}, until resumed")
    return told


def resumptions(telemetry: Telemetry) -> Sequence[int]:
    """Return the first moment of each time that the run was resumed."""
    return (np.flatnonzero(np.diff(telemetry.moments["part"])) + 1).tolist()


def missing_text(record: RunRecord, telemetry: Telemetry) -> str:
    """Say which figures are missing everywhere, and why; empty if none is."""
    missing = [name for name in UNTOLD if name not in telemetry.figures]
    of_gpus = [name for name in UNTOLD if name.startswith("gpu_")]
    told = []
    if set(of_gpus) <= set(missing):
        missing = [name for name in missing if name not in of_gpus]
        ranks = record.environment.get("ranks") or []
        no_gpu = all(rank.get("device") == "cpu" for rank in ranks)
        why = "no rank has one" if no_gpu else "no library or driver tells them"
        told.append(f"figures of GPUs ({why})")
    told += [UNTOLD[name] for name in missing]
    return f"unknown: {', '.join(told)}" if told else ""
