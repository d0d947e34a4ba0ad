"""Charts of what GPUs, processes, hosts and networks did during a run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hpcfed.analysis.curves import windows
from hpcfed.analysis.render.charts import Axis, Drawing, Line, lines
from hpcfed.analysis.render.charts.drawing import layer, short
from hpcfed.analysis.render.sections.section import MOST_LINES, Section
from hpcfed.analysis.run_findings.machine import LOOPBACK, resumptions
from hpcfed.results.stored import RunDetails
from hpcfed.results.telemetry import FIGURES, Telemetry
from hpcfed.words import MIB

HEIGHT = 150
"""Height of a chart: there are many."""
TICKS = 4
"""Ticks of their vertical axis, roughly."""
ABOVE = {"left": 5, "right": 5, "top": 18, "bottom": 5}
"""Pixels around a chart, with room for names above it."""
MOST_POINTS = 240
"""Most points of a line; more moments are averaged."""
MOST_MARKS = 8
"""Most rounds that are marked."""
NEAR = 0.08
"""The least distance of two marks, as a share of the axis."""
UNITS = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0}
"""Units of time, and their seconds."""
LEAST_UNITS = 4
"""An axis of time has at least this many of its units."""


@dataclass(frozen=True)
class Multiple:
    """One of several small charts over the same time."""

    title: str
    label: str
    figures: Sequence[str]
    scale: float = 1.0


MULTIPLES = (
    Multiple("GPUs at work", "% of the time", ["gpu_busy"], 100),
    Multiple("power of GPUs", "W", ["gpu_power"]),
    Multiple("memory of GPUs in use", "GiB", ["gpu_memory"], 1 / 2**30),
    Multiple("temperature of GPUs", "°C", ["gpu_temperature"]),
    Multiple("cores at work", "cores", ["process_cpu", "host_cpu"]),
    Multiple(
        "memory of ranks and hosts", "GiB", ["process_memory", "host_memory"], 1 / 2**30
    ),
    Multiple("network", "MiB/s", ["received", "sent"], 1 / MIB),
)
WHOSE = {
    "process_cpu": "rank {}",
    "process_memory": "rank {}",
    "host_cpu": "{}, all programs",
    "host_memory": "{}, all programs",
    "received": "{}, received",
    "sent": "{}, sent",
}
"""Names of lines; those of GPUs have their ranks' names."""
TOGETHER = {"rank": "ranks", "host": "hosts, all programs", "link": "interfaces"}
"""Names of lines that stand for many."""


def machine(details: RunDetails) -> Section:
    """Draw all figures over time, with rounds marked."""
    section = Section("machine", "What the machine did")
    telemetry = details.telemetry
    if telemetry is None or len(telemetry) < 2:
        return section
    elapsed = running_seconds(telemetry)
    unit = max(
        (name for name in UNITS if elapsed[-1] >= LEAST_UNITS * UNITS[name]),
        key=UNITS.__getitem__,
        default="seconds",
    )
    marks = _marks(telemetry, elapsed / UNITS[unit])
    for multiple in MULTIPLES:
        drawn = _lines(telemetry, multiple, elapsed / UNITS[unit])
        if drawn:
            across = Axis(f"{unit} of the run", zero=True)
            up = Axis(multiple.label, zero=True, about=TICKS)
            title = multiple.title
            if len(drawn) == 1:  # which has no legend
                title += f": {drawn[0].name}"
            made = lines(title, drawn, across, up)
            section.charts.append(_with_marks(made, marks, across.label))
    section.text.append(
        "Dashed lines are the ends of some rounds, by number. Figures of hosts and GPUs "
        "include whatever else ran there. Time in which the run did not run is left out."
    )
    return section


def running_seconds(telemetry: Telemetry) -> np.ndarray:
    """Return the middle of each moment in seconds since the start, without the time
    before the run was resumed.
    """
    began, seconds = telemetry.moments["began"], telemetry.moments["seconds"]
    left_out = np.zeros(len(began))
    for first in resumptions(telemetry):
        left_out[first:] += began[first] - began[first - 1] - seconds[first - 1]
    found: np.ndarray = began - began[0] - left_out + seconds / 2
    return found


def _lines(telemetry: Telemetry, multiple: Multiple, at: np.ndarray) -> list[Line]:
    """Return a line for each owner, or the mean and the range of many."""
    found: dict[tuple[str, str], np.ndarray] = {}
    for name in multiple.figures:
        owners = telemetry.owners[FIGURES[name].owner]
        for owner, values in zip(owners, telemetry.of(name).T, strict=True):
            # A loopback receives what it sends.
            again = name == "received" and owner.split()[-1] == LOOPBACK
            # An interface that moves nothing, and a GPU that another rank reports.
            if np.nan_to_num(values).any() and not again:
                found[name, owner] = multiple.scale * values
    if len(found) <= MOST_LINES:
        drawn = []
        for (name, owner), values in found.items():
            title = WHOSE.get(name, "rank {}").format(owner)
            drawn.append(_line(title, at, values[:, None]))
        return drawn
    drawn = []
    for name in multiple.figures:
        every = [values for (figure, _), values in found.items() if figure == name]
        if every:
            kind = TOGETHER[FIGURES[name].owner]
            what = f", {name}" if kind == "interfaces" else ""
            title = f"{len(every)} {kind}{what}: mean and range"
            drawn.append(_line(title, at, np.stack(every, axis=1)))
    return drawn


def _line(title: str, at: np.ndarray, values: np.ndarray) -> Line:
    """Return a line through the means of owners, with their range: [moments, owners]."""
    known = np.flatnonzero(np.isfinite(values).any(1))
    x, y, low, high = [], [], [], []
    for window in windows(known, MOST_POINTS):
        x.append(float(at[window].mean()))
        y.append(float(np.nanmean(values[window])))
        means = np.nanmean(values[window], axis=0)
        low.append(float(np.nanmin(means)))
        high.append(float(np.nanmax(means)))
    if values.shape[1] == 1:
        return Line(title, x, y)
    return Line(title, x, y, low, high, interval="range", band=True)


def _marks(telemetry: Telemetry, at: np.ndarray) -> list[dict[str, Any]]:
    """Return where some rounds ended, and where the run was resumed."""
    rounds = telemetry.moments["rounds"]
    last = int(rounds.max())
    step = next(
        step
        for power in range(20)
        for step in (10**power, 2 * 10**power, 5 * 10**power)
        if last <= MOST_MARKS * step
    )
    wanted = [(first, "resumed") for first in resumptions(telemetry)]
    for round in range(step, last + 1, step):
        # Rounds that end within the first moment have no place of their own.
        place = int(np.argmax(rounds >= round))
        if place:
            wanted.append((place, f"{round}"))
    found: list[dict[str, Any]] = []
    for place, name in wanted:
        x = float(at[place])
        # Names that are too near would cover each other.
        if all(abs(x - other["x"]) > NEAR * at[-1] for other in found):
            found.append({"x": short(x), "name": name})
    return found


def _with_marks(
    drawing: Drawing, marks: Sequence[dict[str, Any]], label: str
) -> Drawing:
    """Return a low drawing with vertical lines, and their names above them."""
    low = {**drawing.spec, "height": HEIGHT}
    if not marks:
        return replace(drawing, spec=low)
    # The lines decide on the scale.
    place = {"x": {"field": "x", "type": "quantitative", "title": label}}
    rules = layer("rule", place, data=marks, style="ideal")
    text = {**place, "y": {"value": -4}, "text": {"field": "name", "type": "nominal"}}
    # Vega-Lite clips what lies outside of a chart that one can zoom.
    named: dict[str, Any] = {"style": "ideal-name", "align": "center", "clip": False}
    names = layer("text", text, data=marks, dy=0, **named)
    layers = [rules, names, *drawing.spec["layer"]]
    return replace(drawing, spec={**low, "padding": ABOVE, "layer": layers})
