"""Groups runs that differ only in seed or repeat, and finds those whose times suggest
that something else ran on the machine.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import isnan, nan
from statistics import fmean, median, stdev
from typing import Any

import numpy as np
from pydantic_core import to_jsonable_python

from hpcfed.analysis.choices import Combination, defaults_of, distinguish, grouped
from hpcfed.analysis.labels import label
from hpcfed.analysis.statistics import Estimate, disjoint, middle, of_rounds, of_runs
from hpcfed.options import facts
from hpcfed.results.pace import per_round
from hpcfed.results.run import RunRecord
from hpcfed.results.stored import timed_run
from hpcfed.runtime.timer import PHASES

MOST_VARIATION = 0.10
"""A machine counts as quiet up to this coefficient of variation of repeats' medians."""
MOST_DRIFT = 0.15
"""A run counts as quiet up to this change from its first to its last third."""
LEAST_ROUNDS = 18
"""Fewest counted rounds to check for drift: an interval needs six in each third."""


@dataclass(frozen=True)
class Process:
    """A run, or several seeds of one that advanced together and share their times."""

    runs: tuple[RunRecord, ...]
    warmup: int
    """Rounds at the start whose times do not count."""
    source: str
    """Where it comes from, for display."""
    side: str = ""
    """A or B, if a report compares two paths."""

    @cached_property
    def timed(self) -> RunRecord:
        """The run with all times of the process, and with its memory and energy."""
        return timed_run(self.runs)

    @cached_property
    def seconds(self) -> np.ndarray:
        """Seconds of the counted rounds."""
        return self.timed.counted_seconds(self.warmup)

    @cached_property
    def phases(self) -> np.ndarray:
        """Seconds of the counted rounds: [round, rank, phase]."""
        return self.timed.counted_phases(self.warmup)

    @property
    def round_seconds(self) -> float:
        """Seconds per round."""
        return float(per_round(self.seconds))

    @cached_property
    def phase_seconds(self) -> dict[str, float]:
        """Seconds per round of every phase."""
        return self.timed.phase_seconds(self.warmup)

    @cached_property
    def phase_means(self) -> dict[str, float]:
        """Mean seconds of each phase; unlike medians, also of phases of few rounds."""
        means = self.phases.mean((0, 1))
        return dict(zip(PHASES, means.tolist(), strict=True))

    @cached_property
    def samples_per_second(self) -> float:
        """Samples trained in a round divided by its seconds, as the median over the
        counted rounds; NaN if an older version did not count samples.
        """
        counted = len(self.seconds)
        if not counted:
            return nan
        # Samples of all runs that share these seconds, in this process or not.
        # The same rounds as `seconds`: those that warm up come first in both.
        trained = self.timed.rounds["engine_samples"][-counted:]
        return float(np.median(trained / self.seconds))


@dataclass(frozen=True)
class Group:
    """Samples with the same options on the same number of ranks."""

    options: Combination
    processes: tuple[Process, ...]
    key: Combination
    """The options that distinguish it from other groups, beyond clients and ranks."""

    @property
    def first(self) -> RunRecord:
        return self.processes[0].runs[0]

    @property
    def metrics(self) -> list[str]:
        """Metrics besides accuracy that some run has recorded."""
        found: dict[str, None] = {}
        for run in self.seeds:
            found |= dict.fromkeys(run.metrics)
        return list(found)

    @property
    def ranks(self) -> int:
        return int(self.options["ranks"])

    @property
    def clients(self) -> int:
        return int(self.options["clients"])

    @property
    def columns(self) -> int:
        return int(self.first.facts["columns"])

    @property
    def steps(self) -> float:
        """Mean local steps of a round's busiest client; NaN in older records."""
        return self.per_round("longest_steps")

    @property
    def cohort(self) -> float:
        """Mean number of a round's participants; all clients in older records."""
        counted = self.per_round("cohort")
        if isnan(counted):
            return float(self.clients)
        # Reports divide by it, even if no round had a client with data.
        return counted or 1.0

    @cached_property
    def seconds(self) -> Estimate:
        """Seconds per round."""
        if len(self.processes) == 1:
            return of_rounds(list(self.processes[0].seconds))
        return of_runs([process.round_seconds for process in self.processes])

    @cached_property
    def phase_seconds(self) -> dict[str, float]:
        """Seconds per round of every phase."""
        return _over_processes([process.phase_seconds for process in self.processes])

    @cached_property
    def phase_means(self) -> dict[str, float]:
        """Mean seconds of each phase, including phases that only few rounds have."""
        return _over_processes([process.phase_means for process in self.processes])

    @cached_property
    def runs(self) -> list[RunRecord]:
        """All runs, of every process and seed."""
        return [run for process in self.processes for run in process.runs]

    @cached_property
    def seeds(self) -> list[RunRecord]:
        """One run for each seed: a repeat of a seed says nothing new about accuracy."""
        by_seed: dict[int, RunRecord] = {}
        for run in self.runs:
            by_seed.setdefault(run.facts["seed"], run)  # the first repeat stays
        return [by_seed[seed] for seed in sorted(by_seed)]

    @property
    def peak_memory(self) -> float:
        """Bytes of the rank that uses most, as far as known."""
        peaks = [float(run.peak_memory.max(initial=0)) for run in self.runs]
        return float(np.fmax.reduce(peaks))

    @property
    def samples_per_second(self) -> float:
        """Samples trained per second of a round, averaged like `seconds`."""
        rates = [process.samples_per_second for process in self.processes]
        # If no client trains in a round, the rate is 0 and has no logarithm.
        return of_runs(rates).centre if min(rates) > 0 else median(rates)

    def per_round(self, name: str) -> float:
        """Mean of a series, over rounds and seeds; NaN if none has recorded it."""
        series = [run.rounds[name] for run in self.seeds]
        known = [each for each in series if not np.isnan(each).all()]
        return fmean(float(np.nanmean(each)) for each in known) if known else nan


def _over_processes(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """Average each phase over processes, like seconds per round."""
    return {phase: middle([one[phase] for one in found]) for phase in PHASES}


def groups(processes: Sequence[Process]) -> list[Group]:
    """Group processes with the same options, in the order of their labels."""
    by_options = grouped(processes, options_of)
    # What distinguishes a choice depends on all others, so keys come after grouping.
    keys = _with_sides(distinguish(list(by_options)), list(by_options))
    made = []
    for options, key in zip(by_options, keys, strict=True):
        members = tuple(by_options[options])
        made.append(Group(options, members, key))
    # Readers look for a label; nothing else depends on the order.
    return sorted(made, key=_order)


def fewest_ranks(every: Sequence[Group]) -> list[Group]:
    """Return one group for each choice and number of clients, on the fewest ranks.

    The number of ranks only changes rounding, so one of them is enough for accuracy.
    """
    found: dict[tuple[Combination, int], Group] = {}
    for group in sorted(every, key=lambda group: group.ranks):
        found.setdefault((group.key, group.clients), group)
    return list(found.values())


def _with_sides(
    keys: Sequence[Combination], choices: Sequence[Combination]
) -> list[Combination]:
    """Add the side to keys that look alike: files of methods may share a name."""
    names = []
    for key, choice in zip(keys, choices, strict=True):
        names.append((label(key), choice["clients"], choice["ranks"]))
    # Only where two points would look the same: elsewhere the side is noise.
    seen = Counter(names)
    told = []
    for key, choice, name in zip(keys, choices, names, strict=True):
        side = choice.only(("side",))
        told.append(Combination({**key, **side}) if seen[name] > 1 else key)
    return told


def _order(group: Group) -> tuple[str, int, int]:
    return label(group.key), group.clients, group.ranks


def options_of(process: Process) -> Combination:
    """Return what runs of a group must have in common."""
    run = process.runs[0]
    # Options added after the run was made have their defaults.
    defaults = to_jsonable_python(defaults_of(run.config.get("method", "")))
    found: dict[str, Any] = defaults | run.config
    # A run's output folder, its seed and its further metrics do not change anything
    # that is compared.
    for name, stated in facts().items():
        if stated.changes != "figures":
            found.pop(name, None)
    found["ranks"] = run.facts["ranks"]
    found["model"] = run.facts["model"]  # the network that `auto` resolved to
    if run.status != "complete":
        found["rounds"] = run.rounds_done  # fewer rounds: not a repeat
    # These are not options, but times on other devices, or of more seeds, do not
    # compare.
    found["stacked_seeds"] = process.timed.stacked_seeds
    devices = set()
    for rank in run.environment.get("ranks", []):
        devices.add(str(rank.get("device", "?")))
    found["on"] = ", ".join(sorted(devices))
    if process.side:
        # Runs of different sides are not repeats of each other, whatever their options.
        found["side"] = process.side
    return Combination(dict(sorted(found.items())))


@dataclass(frozen=True)
class Noise:
    """A point with unreliable times."""

    group: Group
    variation: float
    """Relative standard deviation of repeats' medians; NaN unless too large."""
    drift: float
    """Largest relative change within a run; NaN unless too large."""


def noisy(every: Sequence[Group]) -> list[Noise]:
    """Find the points whose repeats differ, or whose runs became slower or faster."""
    found = []
    for group in every:
        variation = _variation(group)
        drift = _drift(group)
        if not (isnan(variation) and isnan(drift)):
            found.append(Noise(group, variation, drift))
    return found


def _variation(group: Group) -> float:
    """Return how much repeats differ, if more than a quiet machine would explain."""
    if len(group.processes) < 2:
        return nan
    medians = [process.round_seconds for process in group.processes]
    variation = stdev(medians) / fmean(medians)
    if variation <= MOST_VARIATION or not _apart(group.processes):
        return nan
    return variation


def _apart(processes: Sequence[Process]) -> bool:
    """Tell whether two repeats differ by more than their own rounds do.

    Medians of few rounds differ on a quiet machine, too. If rounds are too few for an
    interval, use their spread.
    """
    inside = [of_rounds(list(process.seconds)) for process in processes]
    return any(disjoint(one, other) for one, other in combinations(inside, 2))


def _drift(group: Group) -> float:
    """Return the largest change of local training within a run, if beyond the noise of
    its rounds.

    Only training is checked: other phases may change because of the method, for example
    when a server begins to learn.
    """
    largest = nan
    for process in group.processes:
        # A round waits for its slowest rank.
        train = process.phases[:, :, PHASES.index("train")].max(1)
        if len(train) < LEAST_ROUNDS:
            continue
        parts = np.array_split(train, 3)
        first, _, last = (of_rounds(part.tolist()) for part in parts)
        if first.centre <= 0 or not disjoint(first, last):
            continue
        change = abs(last.centre / first.centre - 1)
        # `not largest > change` is also true while `largest` is NaN.
        if change > MOST_DRIFT and not largest > change:
            largest = change
    return largest
