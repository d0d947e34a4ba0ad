"""The figures of merit of a study: what `hpcfed show` prints for each point, and what
other programs read.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isnan, nan
from typing import Any

import numpy as np
from rich.console import Console

from hpcfed.analysis.groups import Group, Process, groups
from hpcfed.analysis.outcomes import run_epsilon, run_virtual_seconds
from hpcfed.analysis.render.console import bare_table, plain_text, say
from hpcfed.analysis.scaling import Scaling, ScalingKind, scalings
from hpcfed.analysis.statistics import Estimate
from hpcfed.results.json_values import plain
from hpcfed.results.pace import PER_ROUND
from hpcfed.results.study import StudyRecord, TrialRecord
from hpcfed.words import bytes_text, time_text

UNKNOWN = Estimate(nan)


@dataclass(frozen=True)
class StudyPoint:
    """Measurements of one point, over all its repeats and seeds."""

    point: str
    """Its name in the study, such as `clients=10,ranks=2`."""
    method: str
    clients: int
    ranks: int
    repeats: int
    seconds_per_round: Estimate
    samples_per_second: float
    """Samples that clients train on, including fine-tuning before evaluation, divided
    by the seconds of whole rounds; NaN if an older version did not count them.
    """
    scaling: ScalingKind | None
    """The kind of the next two: the same work in total, or the same on each rank."""
    speedup: Estimate
    """Relative to the fewest ranks; NaN if the study has only one number of ranks."""
    efficiency: Estimate
    accuracy: float
    """Accuracy of clients on their own test data after the last round, as the mean over
    seeds.
    """
    global_accuracy: float
    """Accuracy of the global model on all test data; NaN for methods without one."""
    peak_memory: float
    """Bytes of the rank that uses most."""
    virtual_seconds: float
    """Virtual time of all rounds, as the mean over seeds; NaN without a clock."""
    epsilon: float
    """Privacy spent, as the mean over seeds; NaN if none was requested."""


def study_points(study: StudyRecord) -> list[StudyPoint]:
    """Return the figures of each point with a finished trial, in the study's order."""
    processes = []
    for trial in study.trials:
        if _is_complete(trial):
            processes.append(Process(trial.runs, study.warmup, _point(trial)))
    every = groups(processes)
    found = scalings(every)
    made = [_of_point(group, found) for group in every]
    order = [process.source for process in processes]
    return sorted(made, key=lambda one: order.index(one.point))


def _is_complete(trial: TrialRecord) -> bool:
    return trial.outcome.status == "complete" and bool(trial.runs)


def _point(trial: TrialRecord) -> str:
    """Return `clients=10` for the trial `clients=10/repeat-0`."""
    return trial.name.rpartition("/")[0]


def _of_point(group: Group, found: Sequence[Scaling]) -> StudyPoint:
    scaling = _scaling_of(group, found)
    speedup = efficiency = UNKNOWN
    if scaling is not None:
        place = scaling.ranks.index(group.ranks)
        speedup = scaling.speedup[place]
        efficiency = scaling.efficiency[place]
    return StudyPoint(
        point=group.processes[0].source,
        method=str(group.options["method"]),
        clients=group.clients,
        ranks=group.ranks,
        repeats=len(group.processes),
        seconds_per_round=group.seconds,
        samples_per_second=group.samples_per_second,
        scaling=None if scaling is None else scaling.kind,
        speedup=speedup,
        efficiency=efficiency,
        accuracy=_mean_of_seeds(group, "accuracy"),
        global_accuracy=_mean_of_seeds(group, "global_accuracy"),
        peak_memory=group.peak_memory,
        virtual_seconds=run_virtual_seconds(group).centre,
        epsilon=run_epsilon(group).centre,
    )


def _scaling_of(group: Group, found: Sequence[Scaling]) -> Scaling | None:
    """Return the scaling that a group belongs to; strong ones come first."""
    fixed = {"strong": float(group.clients), "weak": group.clients / group.ranks}
    for scaling in found:
        if scaling.key == group.key and scaling.clients == fixed[scaling.kind]:
            return scaling
    return None


def _mean_of_seeds(group: Group, name: str) -> float:
    return float(np.mean([run.last(name) for run in group.seeds]))


def summary(study: StudyRecord) -> dict[str, Any]:
    """Return the study's figures as JSON values, with null for unknown ones."""
    unfinished = []
    for trial in study.trials:
        if not _is_complete(trial):
            outcome = trial.outcome
            why = {"status": outcome.status, "error": outcome.error or None}
            unfinished.append({"trial": trial.name, **why})
    content = {
        "study": str(study.path.parent),
        "title": study.title,
        "trials": len(study.trials),
        "complete": len(study.trials) - len(unfinished),
        "unfinished": unfinished,
        "points": [asdict(one) for one in study_points(study)],
    }
    told: dict[str, Any] = plain(content)
    return told


def show_study(study: StudyRecord, console: Console) -> None:
    """Print a line for each point."""
    folder = study.path.parent
    complete = sum(map(_is_complete, study.trials))
    title = study.title or folder.name
    say(console, f"{title}: {complete} of {len(study.trials)} trials complete", "")
    columns = [
        "point",
        f"s {PER_ROUND}",
        "95 % interval",
        "speed-up",
        "efficiency",
        "samples/s",
        "accuracy",
        "peak memory",
    ]
    every = study_points(study)
    of_few = {
        "virtual time": [time_text(one.virtual_seconds) for one in every],
        "ε": [_unless_unknown(one.epsilon, ".3g") for one in every],
    }
    known = {name: cells for name, cells in of_few.items() if set(cells) != {"–"}}
    table = bare_table(*columns, *known)
    for number, one in enumerate(every):
        more = [cells[number] for cells in known.values()]
        table.add_row(plain_text(one.point), *_cells(one), *more)
    console.print(table)
    say(console, "", f"the whole page: hpcfed report {folder}")


def _cells(one: StudyPoint) -> list[str]:
    seconds = one.seconds_per_round
    interval = "unknown"
    if seconds.bounded:
        interval = f"{seconds.low:.4g} – {seconds.high:.4g}"
    return [
        f"{seconds.centre:.4g}",
        interval,
        _unless_unknown(one.speedup.centre, ".2f"),
        _unless_unknown(one.efficiency.centre, ".0%"),
        _unless_unknown(one.samples_per_second, ",.0f"),
        _unless_unknown(one.accuracy, ".2%"),
        bytes_text(one.peak_memory),
    ]


def _unless_unknown(value: float, style: str) -> str:
    return "–" if isnan(value) else format(value, style)
