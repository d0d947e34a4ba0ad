"""Runs put together where they differ in seed or repeat alone."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median
from typing import Any

import numpy as np

from hpcfed.config import ANYWHERE, RunConfig
from hpcfed.record.run import RunRecord
from hpcfed.record.timing import PHASES
from hpcfed.report.choices import Choice, distinguish
from hpcfed.report.labels import label
from hpcfed.report.statistics import Estimate, of_rounds, of_runs


@dataclass(frozen=True)
class Sample:
    """One process: a run, or several seeds of one that advanced together and share
    their times.
    """

    runs: tuple[RunRecord, ...]
    warmup: int
    """Rounds at the start whose times do not count."""
    source: str
    """Where it comes from, for people."""

    @cached_property
    def seconds(self) -> np.ndarray:
        """Seconds of the counted rounds. The last round counts even if all were to warm
        up.
        """
        run = self.runs[0]
        timed: np.ndarray = run.rounds["seconds"][run.untimed :]
        last = max(0, len(timed) - 1)
        return timed[min(self.warmup, last) :]

    @cached_property
    def phases(self) -> np.ndarray:
        """Seconds of the counted rounds: [round, rank, phase]."""
        phases = self.runs[0].phases
        counted = len(self.seconds)
        return phases[-counted:] if counted else phases


@dataclass(frozen=True)
class Group:
    """Samples of the same options on the same number of ranks."""

    options: Choice
    samples: tuple[Sample, ...]
    key: Choice
    """The options that set it apart from other groups, beyond clients and ranks."""

    @property
    def first(self) -> RunRecord:
        return self.samples[0].runs[0]

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
        """Local steps per round of the client that has most data."""
        most = int(self.first.train_samples.max(initial=1))
        batches = -(-most // self.options["batch_size"])
        return float(self.options["epochs"] * batches)

    @property
    def cohort(self) -> float:
        """Clients that take part in a round, on average. Old records do not count them:
        then all clients.
        """
        counted = self.first.rounds["cohort"]
        if np.isnan(counted).all():
            return float(self.clients)
        return float(np.nanmean(counted))

    @cached_property
    def seconds(self) -> Estimate:
        """Seconds per round."""
        if len(self.samples) > 1:
            return of_runs([median(sample.seconds) for sample in self.samples])
        return of_rounds(list(self.samples[0].seconds))

    @cached_property
    def phase_seconds(self) -> dict[str, float]:
        """Mean seconds per round by phase, over ranks, counted rounds and samples."""
        by_sample = [sample.phases.mean((0, 1)) for sample in self.samples]
        means = np.mean(by_sample, axis=0)
        return dict(zip(PHASES, means.tolist(), strict=True))

    @cached_property
    def runs(self) -> list[RunRecord]:
        """All runs, of every sample and seed."""
        found: list[RunRecord] = []
        for sample in self.samples:
            found += sample.runs
        return found

    @cached_property
    def seeds(self) -> list[RunRecord]:
        """One run of every seed: a repeat of a seed says nothing new about accuracy."""
        by_seed: dict[int, RunRecord] = {}
        for run in self.runs:
            by_seed.setdefault(run.facts["seed"], run)
        return [by_seed[seed] for seed in sorted(by_seed)]

    @property
    def peak_memory(self) -> float:
        """Bytes of the rank that has most."""
        return max(float(run.peak_memory.max(initial=0)) for run in self.runs)

    def per_round(self, name: str) -> float:
        """Mean of a series, over rounds and seeds."""
        return fmean(float(np.nanmean(run.rounds[name])) for run in self.seeds)


def groups(samples: Sequence[Sample]) -> list[Group]:
    """Put samples of the same options together, in the order of their labels."""
    by_options: dict[Choice, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_options[_options(sample)].append(sample)
    keys = distinguish(list(by_options))
    made = []
    for (options, members), key in zip(by_options.items(), keys, strict=True):
        made.append(Group(options, tuple(members), key))
    return sorted(
        made, key=lambda group: (label(group.key), group.clients, group.ranks)
    )


def _options(sample: Sample) -> Choice:
    """Return what runs must have in common to be put together."""
    run = sample.runs[0]
    found: dict[str, Any] = RunConfig().model_dump(mode="json") | run.config
    for name in (*ANYWHERE, "seed", "seeds"):
        found.pop(name, None)
    found["ranks"] = run.facts["ranks"]
    found["model"] = run.facts["model"]  # the network that `auto` stood for
    found["stacked_seeds"] = run.stacked_seeds
    ranks = run.environment.get("ranks", [])
    devices = {str(rank.get("device", "?")) for rank in ranks}
    found["on"] = ", ".join(sorted(devices))
    return Choice(dict(sorted(found.items())))
