"""Runs out of folders and studies, put together where they differ in seed or repeat
alone.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import isnan, log, nan
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from hpcfed import methods
from hpcfed.config import ANYWHERE, Options, RunConfig
from hpcfed.errors import UserError
from hpcfed.record.checkpoints import CHECKPOINTS
from hpcfed.record.reading import RunRecord, read_run
from hpcfed.record.safe import try_out
from hpcfed.record.timing import PHASES
from hpcfed.report.statistics import Estimate, of_rounds, of_runs, ratio
from hpcfed.study.gather import StudyRecord, read_gathered

WARMUP = 1
"""Rounds at the start of a run that do not count, where no study says otherwise."""
MEASURING = ("on", "stacked_seeds")
"""Not the user's options."""
UNLABELLED = ("clients", "ranks")
"""What figures are drawn over, and no part of a line's name."""

TOLD_FIRST = ("dataset", "attack", "aggregation")
"""Part of a line's name wherever it differs, even where another option would tell the
same.
"""

ABOUT_ATTACKERS = ("attack", "attackers", "attack_strength")
"""What says nothing where there are none."""


@dataclass(frozen=True)
class Sample:
    """One process: a run, or several seeds of one that advanced together and share
    their times.
    """

    runs: tuple[RunRecord, ...]
    warmup: int
    source: str
    """Where it comes from, for people."""

    @cached_property
    def seconds(self) -> np.ndarray:
        """Of the counted rounds; the last one is kept even if all were to warm up."""
        every: np.ndarray = self.runs[0].rounds["seconds"][self.runs[0].untimed :]
        return every[min(self.warmup, max(0, len(every) - 1)) :]

    @cached_property
    def phases(self) -> np.ndarray:
        """Seconds of the counted rounds: [round, rank, phase]."""
        return (
            self.runs[0].phases[-len(self.seconds) :]
            if len(self.seconds)
            else self.runs[0].phases
        )


@dataclass(frozen=True)
class Group:
    """Samples of the same options on the same number of ranks."""

    options: dict[str, Any]
    samples: tuple[Sample, ...]
    names: tuple[str, ...] = ()
    """Options that set it apart from the others, beyond method, clients and ranks."""

    @cached_property
    def label(self) -> str:
        """What sets it apart from the others, beyond clients and ranks."""
        return self.label_without()

    def label_without(self, *known: str) -> str:
        """The same where some of these options are told elsewhere."""
        honest = self.options.get("attack", "none") == "none"
        own = [str(self.options["method"])]
        for name in self.names:
            if (
                name in self.options
                and name not in known
                and not (honest and name in ABOUT_ATTACKERS)
            ):
                own += _short(name, self.options[name], _usual(own[0]).get(name))
        return ", ".join(own)

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
        """Local steps of the client with most data, in a round."""
        most = int(self.first.train_samples.max(initial=1))
        return float(self.options["epochs"] * -(-most // self.options["batch_size"]))

    @property
    def cohort(self) -> float:
        """Clients that take part in a round: the mean, or all where nobody has counted."""
        counted = self.first.rounds["cohort"]
        return (
            float(self.clients)
            if np.isnan(counted).all()
            else float(np.nanmean(counted))
        )

    @cached_property
    def seconds(self) -> Estimate:
        """Per round."""
        if len(self.samples) > 1:
            return of_runs([median(sample.seconds) for sample in self.samples])
        return of_rounds(list(self.samples[0].seconds))

    @cached_property
    def phase_seconds(self) -> dict[str, float]:
        """Mean seconds per round by phase, over ranks, counted rounds and samples."""
        means = np.mean([sample.phases.mean((0, 1)) for sample in self.samples], axis=0)
        return dict(zip(PHASES, means.tolist(), strict=True))

    @cached_property
    def seeds(self) -> list[RunRecord]:
        """One run of every seed: a repeat of the same seed says nothing new about
        accuracy.
        """
        own = {
            run.facts["seed"]: run
            for sample in reversed(self.samples)
            for run in sample.runs
        }
        return [own[seed] for seed in sorted(own)]

    @property
    def peak_memory(self) -> float:
        """Bytes of the rank that has most."""
        return max(
            float(run.peak_memory.max(initial=0))
            for sample in self.samples
            for run in sample.runs
        )

    def per_round(self, name: str) -> float:
        return fmean(float(np.nanmean(run.rounds[name])) for run in self.seeds)


@dataclass
class Found:
    samples: list[Sample] = field(default_factory=list)
    unfinished: list[tuple[str, str, str]] = field(default_factory=list)
    """Name, status and error of runs that did not come to their end."""
    studies: list[StudyRecord] = field(default_factory=list)
    alone: int = 0
    """Runs that are of no study."""
    unread: list[str] = field(default_factory=list)
    """Why files were left out."""


def find(paths: Iterable[Path], *, unfinished: bool = False) -> Found:
    """Every run and study under the paths; what cannot be read is named, and the rest
    goes on.

    A run that is still at work, or did not end well, counts with the rounds that it has
    if `unfinished` says so.
    """
    found, seen = Found(), set()
    for path in paths:
        files = list(_files(path))
        if not files:
            raise UserError(
                f"{path} holds no run and no study (there is no run.h5 and no study.h5 in it)"
            )
        for file in files:
            if file.resolve() not in seen:
                seen.add(file.resolve())
                try:
                    try_out([file])
                    _add_study(found, file) if file.name == "study.h5" else _add_run(
                        found, file.parent, unfinished
                    )
                except UserError as error:
                    found.unread.append(str(error))
    found.samples = _stacked(found.samples)
    return found


def _files(path: Path) -> list[Path]:
    """Every study and run under a path.

    A study stands for the runs in its folder, a run for its checkpoints, which hold
    copies of its record, and a run with seeds of another beside it for these: reading
    it refuses both.
    """
    if path.is_file() and path.name in ("study.h5", "run.h5"):
        return [path]
    if not path.exists():
        raise UserError(f"no such folder: {path}")
    studies = [study for study in sorted(path.rglob("study.h5")) if study.is_file()]
    covered = {study.parent for study in studies}
    every = [
        run
        for run in sorted(path.rglob("run.h5"))
        if run.is_file() and not covered & set(run.parents)
    ]
    covered = {run.parent / CHECKPOINTS for run in every}
    runs = [run for run in every if not covered & set(run.parents)]
    alone = {run.parent for run in runs}
    runs = [
        run
        for run in runs
        if not (run.parent.parent in alone and run.parent.name.startswith("seed-"))
    ]
    return [*studies, *runs]


def _add_study(found: Found, path: Path) -> None:
    study = read_gathered(path)
    found.studies.append(study)
    found.unread += study.unread
    for trial in study.trials:
        if trial.outcome.status == "complete" and trial.runs:
            found.samples.append(
                Sample(trial.runs, study.warmup, f"{path.parent.name}: {trial.name}")
            )
        else:
            found.unfinished.append(
                (trial.name, trial.outcome.status, trial.outcome.error)
            )


def _add_run(found: Found, folder: Path, unfinished: bool) -> None:
    run = read_run(folder)
    found.alone += 1
    if run.rounds_done and (unfinished or run.status == "complete"):
        found.samples.append(Sample((run,), WARMUP, str(folder)))
    if run.status != "complete" or not run.rounds_done:
        found.unfinished.append((str(folder), run.status, run.error))


def _stacked(samples: Sequence[Sample]) -> list[Sample]:
    """Seeds that advanced together, found one by one in their folders, become one
    sample again.
    """
    together: dict[Path, list[Sample]] = defaultdict(list)
    for sample in samples:
        run = sample.runs[0]
        alone = len(sample.runs) > 1 or run.stacked_seeds == 1
        together[Path(sample.source) if alone else run.folder.parent].append(sample)
    return [
        Sample(
            tuple(run for one in members for run in one.runs),
            members[0].warmup,
            members[0].source,
        )
        for members in together.values()
    ]


def groups(samples: Sequence[Sample]) -> list[Group]:
    by_options: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_options[json.dumps(_options(sample), sort_keys=True)].append(sample)
    every = [
        Group(json.loads(key), tuple(members)) for key, members in by_options.items()
    ]
    return sorted(
        named(every), key=lambda group: (group.label, group.clients, group.ranks)
    )


def _options(sample: Sample) -> dict[str, Any]:
    run = sample.runs[0]
    config = RunConfig().model_dump(mode="json") | run.config
    own = {
        name: value
        for name, value in config.items()
        if name not in (*ANYWHERE, "seed", "seeds")
    }
    devices = sorted(
        {str(place.get("device", "?")) for place in run.environment.get("ranks", [])}
    )
    found = {
        "ranks": run.facts["ranks"],
        "model": run.facts["model"],
    }  # the network that auto stood for
    return own | found | {"stacked_seeds": run.stacked_seeds, "on": ", ".join(devices)}


def named(every: Sequence[Group]) -> list[Group]:
    """The groups with the options that set each apart from the others of its method.

    An option is left out where those before it already tell: a data set has its own
    network, rounds and target as a rule, which would make names long and say nothing.
    """
    always = [
        name
        for name in TOLD_FIRST
        if len({json.dumps(group.options.get(name)) for group in every}) > 1
    ]
    networks = {
        (group.options.get("dataset"), group.options.get("model")) for group in every
    }
    if len(networks) > len(
        {dataset for dataset, _ in networks}
    ):  # methods would be compared by their networks
        always.append("model")
    of_method: dict[str, list[Group]] = defaultdict(list)
    for group in every:
        of_method[group.options["method"]].append(group)
    made = []
    for members in of_method.values():
        names = _telling(
            members, always
        )  # once for all of a method: it looks at every option of every one
        made += [replace(group, names=names) for group in members]
    return made


def _telling(members: Sequence[Group], always: Sequence[str]) -> tuple[str, ...]:
    names = {name for group in members for name in group.options} - {
        *UNLABELLED,
        *MEASURING,
        *always,
    }
    told = list(always)
    for name in (*sorted(names), *MEASURING):
        alike: dict[str, set[str]] = defaultdict(set)
        for group in members:
            alike[json.dumps([group.options.get(one) for one in told])].add(
                json.dumps(group.options.get(name))
            )
        if any(len(values) > 1 for values in alike.values()):
            told.append(name)
    return tuple(told)


def _short(name: str, value: Any, usual: Any) -> list[str]:
    if isinstance(value, bool):
        return [name if value else f"no {name}"]
    if value == usual and value in (None, 0, ""):
        return []  # that stands for none, or for what other options say, and the others have the name with their value
    return [f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"]


@cache
def _usual(method: str) -> dict[str, Any]:
    """The defaults of a method's own options, and of all runs'."""
    own = methods.load(method).Options() if method in methods.names() else Options()
    return RunConfig().model_dump(mode="json") | own.model_dump(mode="json")


@dataclass(frozen=True)
class Scaling:
    """Groups that differ in ranks alone (strong), or in ranks with as many clients on
    each (weak).
    """

    name: str
    kind: str
    ranks: list[int]
    seconds: list[Estimate]
    speedup: list[Estimate]
    """Over the fewest ranks; of weak scaling, in clients per second."""
    efficiency: list[Estimate]
    ideal: list[float]


def scalings(every: Sequence[Group]) -> list[Scaling]:
    strong: dict[tuple[str, str], list[Group]] = defaultdict(list)
    weak: dict[tuple[str, str], list[Group]] = defaultdict(list)
    for group in every:
        strong[group.label, f"{group.clients} clients"].append(group)
        weak[group.label, f"{group.clients / group.ranks:g} clients per rank"].append(
            group
        )
    made = []
    for kind, families in {"strong": strong, "weak": weak}.items():
        for (label, fixed), members in families.items():
            if len({group.ranks for group in members}) > 1:
                made.append(
                    _scaling(
                        f"{label}: {fixed}",
                        kind,
                        sorted(members, key=lambda group: group.ranks),
                    )
                )
    return made


def _scaling(name: str, kind: str, members: Sequence[Group]) -> Scaling:
    base = members[0]
    speedup, efficiency = [], []
    for group in members:
        more = group.ranks / base.ranks
        gain = 1.0 if kind == "strong" else more
        faster = (
            Estimate(1.0, 1.0, 1.0)
            if group is base
            else ratio(base.seconds, group.seconds, gain)
        )
        speedup.append(faster)
        efficiency.append(
            Estimate(faster.centre / more, faster.low / more, faster.high / more)
        )
    seconds = [group.seconds for group in members]
    ideal = [group.ranks / base.ranks for group in members]
    return Scaling(
        name,
        kind,
        [group.ranks for group in members],
        seconds,
        speedup,
        efficiency,
        ideal,
    )


def final_accuracy(run: RunRecord) -> float:
    """Of the global model, or of the clients' mean where there is none."""
    common = run.last("global_accuracy")
    return run.last("accuracy") if isnan(common) else common


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of log y over log x: 1 is proportional, 0 is flat; NaN of fewer than two
    different x.
    """
    if len(set(x)) < 2:
        return nan
    return float(
        np.polyfit([log(value) for value in x], [log(value) for value in y], 1)[0]
    )
