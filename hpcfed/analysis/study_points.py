"""A study's figures of merit, as `hpcfed show` and its --json print them."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import nan
from typing import Any

import numpy as np
from rich.console import Console

from hpcfed.analysis.findings import Table
from hpcfed.analysis.groups import Group, Process, groups
from hpcfed.analysis.outcomes import run_epsilon, run_virtual_seconds
from hpcfed.analysis.render.console import print_tables, rendered, say
from hpcfed.analysis.scaling import Scaling, scalings
from hpcfed.analysis.server_costs import server_costs
from hpcfed.analysis.server_findings import fit_answers, growth_answers, server_tables
from hpcfed.analysis.statistics import Estimate
from hpcfed.errors import command_line
from hpcfed.results.as_json import plain
from hpcfed.results.pace import PER_ROUND
from hpcfed.results.study import StudyRecord, TrialRecord
from hpcfed.words import DASH, bytes_text, formatted, time_text


def _interval(one: dict[str, Any]) -> str:
    seconds = one["seconds_per_round"]
    return f"{seconds.low:.4g} – {seconds.high:.4g}" if seconds.bounded else "unknown"


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "point": lambda one: str(one["point"]),
    f"s {PER_ROUND}": lambda one: f"{one['seconds_per_round'].centre:.4g}",
    "95 % interval": _interval,
    "speed-up": lambda one: formatted(".2f")(one["speedup"].centre),
    "efficiency": lambda one: formatted(".0%")(one["efficiency"].centre),
    "samples/s": lambda one: formatted(",.0f")(one["samples_per_second"]),
    "accuracy": lambda one: formatted(".2%")(one["accuracy"]),
    "peak memory": lambda one: bytes_text(one["peak_memory"]),
    "virtual time": lambda one: time_text(one["virtual_seconds"]),
    "ε": lambda one: formatted(".3g")(one["epsilon"]),
}
"""What the terminal shows of a point's figures, by the column's name."""
OF_FEW = ("virtual time", "ε")
"""Columns that are left out if no point has a figure."""


def study_points(study: StudyRecord) -> list[dict[str, Any]]:
    """Return the figures of each finished point, over repeats and seeds, in order."""
    every = _groups(study)
    found = scalings(every)
    made = [_figures(group, found) for group in every]
    order = [trial.name.rpartition("/")[0] for trial in study.trials]
    # The study's order, not that of labels: other programs rely on it.
    return sorted(made, key=lambda one: order.index(one["point"]))


def _groups(study: StudyRecord) -> list[Group]:
    """Return the finished points."""
    processes = []
    for trial in study.trials:
        if _is_complete(trial):
            # `clients=10` for the trial `clients=10/repeat-0`.
            point = trial.name.rpartition("/")[0]
            processes.append(Process(trial.runs, study.warmup, point))
    return groups(processes)


def _of_server(study: StudyRecord) -> tuple[list[Table], list[str]]:
    """Return tables and verdicts about the server's model, if the study has one."""
    costs = server_costs(_groups(study), [study])
    return server_tables(costs), [*fit_answers(costs), *growth_answers(costs)]


def _is_complete(trial: TrialRecord) -> bool:
    return trial.outcome.status == "complete" and bool(trial.runs)


def _figures(group: Group, found: Sequence[Scaling]) -> dict[str, Any]:
    """Return a point's figures, in the order of the JSON; NaN for unknown ones."""
    kind = None
    speedup = efficiency = Estimate(nan)
    scaling = _scaling_of(group, found)
    if scaling is not None:
        kind, place = scaling.kind, scaling.ranks.index(group.ranks)
        speedup, efficiency = scaling.speedup[place], scaling.efficiency[place]
    return {
        "point": group.processes[0].source,
        "method": str(group.options["method"]),
        "clients": group.clients,
        "ranks": group.ranks,
        "repeats": len(group.processes),
        "seconds_per_round": group.seconds,
        # With fine-tuning before evaluation, by the seconds of whole rounds.
        "samples_per_second": group.samples_per_second,
        # Of the next two: the same work in total, or the same on each rank.
        "scaling": kind,
        "speedup": speedup,
        "efficiency": efficiency,
        "accuracy": _mean_of_seeds(group, "accuracy"),
        "global_accuracy": _mean_of_seeds(group, "global_accuracy"),
        "peak_memory": group.peak_memory,
        "virtual_seconds": run_virtual_seconds(group).centre,
        "epsilon": run_epsilon(group).centre,
    }


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
    points = study_points(study)
    for one in points:
        for name in ("seconds_per_round", "speedup", "efficiency"):
            one[name] = asdict(one[name])
    content = {
        "study": str(study.path.parent),
        "title": study.title,
        "trials": len(study.trials),
        "complete": len(study.trials) - len(unfinished),
        "unfinished": unfinished,
        "points": points,
    }
    tables, answers = _of_server(study)
    if tables:
        found = [table.json for table in tables]
        content["server"] = {"tables": found, "verdicts": answers}
    told: dict[str, Any] = plain(content)
    return told


def show_study(study: StudyRecord, console: Console) -> None:
    """Print a line for each point."""
    folder = study.path.parent
    complete = sum(map(_is_complete, study.trials))
    title = study.title or folder.name
    say(console, f"{title}: {complete} of {len(study.trials)} trials complete", "")
    every = study_points(study)
    shown = {name: [write(one) for one in every] for name, write in COLUMNS.items()}
    for name in OF_FEW:
        if set(shown[name]) <= {DASH}:
            del shown[name]
    table = Table(list(shown), list(zip(*shown.values(), strict=True)))
    console.print(rendered(table))
    tables, answers = _of_server(study)
    if tables:
        console.print()
        print_tables(console, tables)
        say(console, "", *answers)
    say(console, "", f"the whole page: {command_line('report', folder)}")
