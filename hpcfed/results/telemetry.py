"""Telemetry in `run.h5`: figures of ranks, hosts and network interfaces over time."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import h5py
import numpy as np

from hpcfed.results.format import Declared, create, create_names
from hpcfed.results.safe import MOST, Reader
from hpcfed.runtime.history import MOST as MOST_MOMENTS
from hpcfed.runtime.history import History

GROUP = "telemetry"


class TelemetryFigure(NamedTuple):
    """What is sampled."""

    owner: str
    """Whose figure it is: of a `rank`, a `host`, or a `link`."""
    unit: str
    meaning: str
    high: float = MOST


FIGURES = {
    "gpu_busy": TelemetryFigure(
        "rank", "fraction", "time in which the rank's GPU worked, as its driver says", 1
    ),
    "gpu_power": TelemetryFigure(
        "rank", "W", "power of the rank's GPU, from its counter of energy"
    ),
    "gpu_memory": TelemetryFigure(
        "rank", "bytes", "memory of the rank's GPU that all processes use"
    ),
    "gpu_temperature": TelemetryFigure(
        "rank", "°C", "temperature of the rank's GPU", 1000
    ),
    "process_cpu": TelemetryFigure(
        "rank", "1", "cores that the rank's process keeps busy"
    ),
    "process_memory": TelemetryFigure("rank", "bytes", "memory of the rank's process"),
    "host_cpu": TelemetryFigure("host", "1", "cores that are busy, by all programs"),
    "host_memory": TelemetryFigure("host", "bytes", "memory in use, by all programs"),
    "received": TelemetryFigure("link", "bytes/s", "received through the interface"),
    "sent": TelemetryFigure("link", "bytes/s", "sent through the interface"),
}
"""Figures by name; all are means over a moment."""
MOMENTS = {
    "began": ("s", "when the moment began, in seconds since 1970, UTC"),
    "seconds": ("s", "seconds of it that readings cover"),
    "rounds": ("round", "how many rounds were done at its end"),
    "part": ("1", "how often the run had been resumed"),
}
"""What is known about each moment."""
OWNERS = ("rank", "host", "link")
COST = "CPU seconds that the readings of each rank's thread took"


@dataclass(frozen=True)
class Telemetry:
    """What a run's GPUs, processes, hosts and networks did over time."""

    moments: dict[str, np.ndarray]
    """By the names of `MOMENTS`: [moments]."""
    owners: dict[str, list[str]]
    """Names of ranks, hosts and links."""
    figures: dict[str, np.ndarray]
    """By the names of `FIGURES`: [moments, owners]. Figures that nobody has are left
    out, and what is unknown is NaN.
    """
    cost: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """CPU seconds that each rank's readings took."""

    def __len__(self) -> int:
        return len(self.moments["began"])

    @property
    def end(self) -> float:
        """When the last moment ended, in seconds since 1970."""
        return float(self.moments["began"][-1] + self.moments["seconds"][-1])

    def of(self, name: str) -> np.ndarray:
        """Return a figure: [moments, owners]; all NaN if nobody has it."""
        shape = len(self), len(self.owners[FIGURES[name].owner])
        return self.figures.get(name, np.full(shape, np.nan))

    def until(self, rounds: int) -> "Telemetry":
        """Return the moments in which no more than this many rounds were done."""
        return self._at(np.flatnonzero(self.moments["rounds"] <= rounds))

    def thinned(self, most: int = MOST_MOMENTS) -> "Telemetry":
        """Merge neighbours until there are at most this many moments, but none across a
        time in which the run did not run.
        """
        found = self
        # A run that was resumed hundreds of times has a moment for each time.
        while len(found) > most and len(np.unique(found.moments["part"])) < most / 2:
            found = found._merged()
        return found

    def _at(self, kept: np.ndarray) -> "Telemetry":
        moments = {name: values[kept] for name, values in self.moments.items()}
        figures = {name: values[kept] for name, values in self.figures.items()}
        return replace(self, moments=moments, figures=figures)

    def _merged(self) -> "Telemetry":
        """Merge each two neighbours of the same part."""
        part, seconds = self.moments["part"], self.moments["seconds"]
        # Counted anew in each part: the first of a pair has an even number.
        place = np.arange(len(self)) - np.searchsorted(part, part)
        firsts = np.flatnonzero(place % 2 == 0)
        figures = {}
        for name, values in self.figures.items():
            known = np.where(np.isfinite(values), seconds[:, None], 0.0)
            sums = np.add.reduceat(np.nan_to_num(values) * known, firsts)
            with np.errstate(invalid="ignore"):
                figures[name] = sums / np.add.reduceat(known, firsts)
        moments = {
            "began": self.moments["began"][firsts],
            "seconds": np.add.reduceat(seconds, firsts),
            "rounds": np.maximum.reduceat(self.moments["rounds"], firsts),
            "part": part[firsts],
        }
        return replace(self, moments=moments, figures=figures)

    def then(self, later: "Telemetry") -> "Telemetry":
        """Return these moments, then those after the run was resumed. Hosts, links and
        ranks may be others.
        """
        owners = {}
        for kind in OWNERS:
            both = [*self.owners[kind], *later.owners[kind]]
            owners[kind] = list(dict.fromkeys(both))
        figures = {}
        for name, figure in FIGURES.items():
            if name in self.figures or name in later.figures:
                wanted = owners[figure.owner]
                pieces = [one._for(name, wanted) for one in (self, later)]
                figures[name] = np.concatenate(pieces)
        moments = {}
        for name in MOMENTS:
            moments[name] = np.concatenate([self.moments[name], later.moments[name]])
        cost = np.zeros(len(owners["rank"]))
        for one in (self, later):
            for rank, took in zip(one.owners["rank"], one.cost, strict=True):
                cost[owners["rank"].index(rank)] += took
        return Telemetry(moments, owners, figures, cost)

    def _for(self, name: str, owners: Sequence[str]) -> np.ndarray:
        """Return a figure of these owners, NaN for those that are not known here."""
        mine, here = self.owners[FIGURES[name].owner], self.of(name)
        found = np.full((len(self), len(owners)), np.nan)
        for place, owner in enumerate(owners):
            if owner in mine:
                found[:, place] = here[:, mine.index(owner)]
        return found


def joined(
    histories: Sequence[History], began: float, *, part: int = 0
) -> Telemetry | None:
    """Join what all ranks have read since they began together; None if that is nothing
    yet. `part`: how often the run was resumed.
    """
    step = max(history.step for history in histories)
    for history in histories:
        while history.step < step:
            history.coarsen()
    length = max(len(history.seconds) for history in histories)
    seconds, rounds = np.zeros((2, length))
    found: dict[str, dict[str, np.ndarray]] = {}
    for history in histories:
        covered = len(history.seconds)
        seconds[:covered] = np.maximum(seconds[:covered], history.seconds)
        rounds[:covered] = np.maximum(rounds[:covered], history.rounds)
        means = history.means()
        for series, values in zip(history.series, means.T, strict=True):
            padded = np.pad(values, (0, length - covered), constant_values=np.nan)
            found.setdefault(series.figure, {})[series.owner] = padded
    if not length:
        return None
    owners = {}
    for kind in OWNERS:
        of_kind = [
            found.get(name, {}) for name in FIGURES if FIGURES[name].owner == kind
        ]
        owners[kind] = list(dict.fromkeys(name for one in of_kind for name in one))
    # Ranks come in order, and each has a process.
    figures = {}
    for name, by_owner in found.items():
        if any(np.isfinite(values).any() for values in by_owner.values()):
            unknown = np.full(length, np.nan)
            columns = [
                by_owner.get(one, unknown) for one in owners[FIGURES[name].owner]
            ]
            figures[name] = np.stack(columns, axis=1)
    moments = {
        "began": began + step * np.arange(length),
        "seconds": seconds,
        "rounds": rounds,
        "part": np.full(length, float(part)),
    }
    cost = np.array([history.cost for history in histories])
    whole = Telemetry(moments, owners, figures, cost)
    return whole._at(np.flatnonzero(seconds > 0))


class TelemetryGroup:
    """The group in the file of a run in progress."""

    def __init__(self, file: h5py.File) -> None:
        self._file = file
        self._earlier: Telemetry | None = None
        """From before the run was resumed."""

    def restore(self, old: Reader, rounds: int) -> None:
        """Take over what was sampled in the first rounds."""
        found = telemetry_of(old)
        if found is not None:
            self._earlier = found.until(rounds)
            self._replace(self._earlier)

    def write(self, histories: Sequence[History], began: float) -> None:
        """Replace the group by what all ranks have read since `began`, behind what was
        restored.
        """
        earlier = self._earlier
        part = 0
        if earlier is not None and len(earlier):
            part = int(earlier.moments["part"][-1]) + 1
            # The clock of another host may be behind.
            began = max(began, earlier.end)
        now = joined(histories, began, part=part)
        if now is not None:
            whole = now if earlier is None else earlier.then(now)
            self._replace(whole.thinned())

    def _replace(self, whole: Telemetry) -> None:
        # Its moments are others each time: when there are too many, they are merged.
        if GROUP in self._file:
            del self._file[GROUP]
        if not len(whole):
            return
        for name, (unit, meaning) in MOMENTS.items():
            values = whole.moments[name]
            where = f"{GROUP}/{name}"
            declared = Declared(where, values.shape, ("moment",), unit, meaning)
            create(self._file, declared, values)
        for kind in OWNERS:
            create_names(self._file, f"{GROUP}/{kind}", whole.owners[kind])
        for name, values in whole.figures.items():
            owner, unit, meaning, _ = FIGURES[name]
            dimensions = ("moment", owner)
            declared = Declared(
                f"{GROUP}/{name}", values.shape, dimensions, unit, meaning, "f4"
            )
            create(self._file, declared, values.astype("f4"))
        cost = Declared(f"{GROUP}/cost", whole.cost.shape, ("rank",), "s", COST)
        create(self._file, cost, whole.cost)


def telemetry_of(file: Reader) -> Telemetry | None:
    """Read the group; None if the file has none."""
    if GROUP not in file:
        return None
    group = file.within(GROUP)
    moments: dict[str, np.ndarray] = {}
    for name in MOMENTS:
        length = len(moments["began"]) if moments else None
        moments[name] = group.between(name, (length,))
        if np.isnan(moments[name]).any():
            raise ValueError(f"{GROUP}/{name} holds impossible numbers")
    for name in ("began", "part"):
        if (np.diff(moments[name]) < 0).any():
            raise ValueError(f"{GROUP}/{name} does not rise")
    owners = {kind: group.texts(kind) for kind in OWNERS}
    figures = {}
    for name, figure in FIGURES.items():
        if name in group:
            shape = len(moments["began"]), len(owners[figure.owner])
            figures[name] = group.between(name, shape, high=figure.high)
    cost = group.between("cost", (len(owners["rank"]),))
    return Telemetry(moments, owners, figures, cost)
