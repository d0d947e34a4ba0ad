"""Figures for other programs: CSV of all rounds, ranks and points, JSON of what the
page shows, and input for Extra-P.
"""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from hpcfed.analysis.choices import values_of
from hpcfed.analysis.comparison.comparison import Comparison
from hpcfed.analysis.comparison.shown import exported
from hpcfed.analysis.costmodel import Fitted, fit_groups
from hpcfed.analysis.groups import Group, Noise, Process, noisy
from hpcfed.analysis.labels import label, scaling_label
from hpcfed.analysis.outcomes import (
    last_metric,
    run_bytes,
    run_energy,
    run_epsilon,
    run_seconds,
    run_virtual_seconds,
)
from hpcfed.analysis.render.sections.section import Section
from hpcfed.analysis.run_findings import read_files
from hpcfed.analysis.scaling import Scaling, scalings
from hpcfed.analysis.statistics import Estimate
from hpcfed.analysis.verdicts import verdicts
from hpcfed.results.as_json import plain, run_summary
from hpcfed.results.folder import RECORD
from hpcfed.results.run import RunRecord
from hpcfed.results.series import METRIC_SERIES, ROUND_SERIES
from hpcfed.results.stored import longest
from hpcfed.results.study import StudyRecord
from hpcfed.results.telemetry import FIGURES, MOMENTS
from hpcfed.runtime.timer import PHASES

POINT = ("method", "dataset", "clients", "ranks", "columns")
FACTS = (*POINT, "seed")
ABOUT = ("source", *FACTS, "stacked_seeds", "counted")
"""The first columns; the options that differ follow."""
ESTIMATED: dict[str, Callable[[Group], Estimate]] = {
    "seconds_per_round": lambda group: group.seconds,
    "seconds": run_seconds,
    "accuracy": lambda group: last_metric(group, "accuracy"),
    "global_accuracy": lambda group: last_metric(group, "global_accuracy"),
    "bytes": run_bytes,
    "energy": run_energy,
    "virtual_seconds": run_virtual_seconds,
    "epsilon": run_epsilon,
}
"""Figures of a point; each has separate columns for the ends of its interval."""
SECONDS = [f"{phase}_seconds" for phase in PHASES]
"""Columns of phases."""


def csv_text(every: Sequence[Group]) -> str:
    """Return a line for each round of each run, with a column for each option that
    differs. Phases are means over ranks.
    """
    series = [*ROUND_SERIES, *_metric_series(every)]
    figures = ["round", *series, *SECONDS]
    swept = _swept(every, known=[*ABOUT, *figures])
    head = [*ABOUT, *swept, *figures]
    lines: list[list[Any]] = [head]
    for group, process, run in _runs(every):
        values = [_cell(group.options.get(name)) for name in swept]
        facts = [run.facts[fact] for fact in FACTS]
        about = [process.source, *facts]
        # A metric that only other runs have.
        unknown = np.full(run.rounds_done, np.nan)
        # Warm-up rounds come first, so the counted ones are the last of the run that was
        # there to the end: a seed may have ended before it.
        first_counted = process.timed.rounds_done - len(process.seconds)
        for round in range(run.rounds_done):
            counted = int(round >= first_counted)
            # Follows the table of series: a new series needs no change here.
            cells = [run.rounds.get(name, unknown)[round] for name in series]
            phases = run.phases[round].mean(0)
            about_round = [*about, run.stacks[round], counted]
            lines.append([*about_round, *values, round + 1, *cells, *phases])
    return _csv(lines)


def ranks_csv_text(every: Sequence[Group]) -> str:
    """Return a line for each rank of each round; source, seed and round identify its
    line in `csv_text`.
    """
    head = ["source", "seed", "round", "rank", "rank_seconds", *SECONDS]
    lines: list[list[Any]] = [head]
    for _, process, run in _runs(every):
        for round, rank in np.ndindex(*run.wall.shape):
            about = [process.source, run.facts["seed"], round + 1, rank]
            phases = run.phases[round, rank]
            lines.append([*about, run.wall[round, rank], *phases])
    return _csv(lines)


def telemetry_csv_text(every: Sequence[Group]) -> str:
    """Return a line for each moment of each rank, host and interface, of processes that
    have a folder of their own. Runs that advance together share their moments.
    """
    lines: list[list[Any]] = [["source", *MOMENTS, "of", "name", *FIGURES]]
    for _, process, run in _runs(every):
        telemetry = None
        if run is longest(process.runs) and (run.folder / RECORD).is_file():
            telemetry = read_files([run]).details.telemetry
        if telemetry is None:
            continue
        when = np.stack([telemetry.moments[name] for name in MOMENTS], axis=1)
        for kind, owners in telemetry.owners.items():
            # Figures of others stay empty.
            unknown = np.full((len(when), len(owners)), np.nan)
            figures = []
            for name, figure in FIGURES.items():
                known = figure.owner == kind
                figures.append(telemetry.of(name) if known else unknown)
            for moment, place in np.ndindex(*unknown.shape):
                about = [process.source, *when[moment], kind, owners[place]]
                cells = [_written(float(values[moment, place])) for values in figures]
                lines.append([*about, *cells])
    return _csv(lines)


def _written(value: float) -> str:
    """Return six digits, which short floats have; empty if unknown."""
    return "" if np.isnan(value) else f"{value:.6g}"


def _runs(every: Sequence[Group]) -> Iterator[tuple[Group, Process, RunRecord]]:
    for group in every:
        for process in group.processes:
            for run in process.runs:
                yield group, process, run


def points_csv_text(every: Sequence[Group]) -> str:
    """Return a line for each point, with a column for each option that differs. Runs
    and seeds are summarised by the mean and the ends of its confidence interval.
    """
    estimated = [*ESTIMATED, *_metric_series(every)]
    figures = ["runs", "seeds"]
    for name in estimated:
        figures += [name, f"{name}_low", f"{name}_high"]
    figures += ["peak_memory", *SECONDS]
    swept = _swept(every, known=[*POINT, *figures])
    lines: list[list[Any]] = [[*POINT, *swept, *figures]]
    for group in every:
        cells = [group.first.facts[fact] for fact in POINT]
        cells += [_cell(group.options.get(name)) for name in swept]
        cells += [len(group.processes), len(group.seeds)]
        for name in estimated:
            if name in ESTIMATED:
                estimate = ESTIMATED[name](group)
            else:  # a metric added by --metrics
                estimate = last_metric(group, name)
            cells += [estimate.centre, estimate.low, estimate.high]
        lines.append([*cells, group.peak_memory, *group.phase_seconds.values()])
    return _csv(lines)


def _metric_series(every: Sequence[Group]) -> list[str]:
    """Return the series of metrics that some run has."""
    recorded: set[str] = set()
    for _, _, run in _runs(every):
        recorded |= run.rounds.keys()
    return [name for name in METRIC_SERIES if name in recorded]


def _swept(every: Sequence[Group], known: Sequence[str]) -> list[str]:
    """Return options in which the groups differ and that have no column yet."""
    # A dict as an ordered set, because methods have their own options.
    names: dict[str, None] = {}
    for group in every:
        names |= dict.fromkeys(group.options)
    for name in known:
        names.pop(name, None)
    choices = [group.options for group in every]
    return [name for name in names if len(values_of(choices, name)) > 1]


def _cell(value: Any) -> Any:
    """Return an option's value as a cell: lists as JSON, and an empty cell if a method
    does not have the option.
    """
    if isinstance(value, list | dict):
        return json.dumps(value)
    return value


def _csv(lines: Iterable[Sequence[Any]]) -> str:
    # Not the module's default \r\n, which confuses Unix tools.
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def json_text(
    every: Sequence[Group],
    comparison: Comparison | None = None,
    sections: Sequence[Section] = (),
    studies: Sequence[StudyRecord] = (),
) -> str:
    """Return as JSON what the page shows, including the tables of its sections, and the
    summary of each seed.
    """
    tables = {}
    for section in sections:
        tables[section.id] = [table.json for table in section.tables]
    content = {
        "comparison": None if comparison is None else exported(comparison),
        "verdicts": [asdict(verdict) for verdict in verdicts(every, studies)],
        "noisy": [_noise(noise) for noise in noisy(every)],
        "groups": [_group(group) for group in every],
        "scaling": [_scaling(one) for one in scalings(every)],
        "cost_models": [_cost_model(one) for one in fit_groups(every)],
        "tables": tables,
    }
    # JSON has neither NaN nor infinity: `plain` turns them into null.
    return json.dumps(plain(content), indent=1, allow_nan=False)


def _group(group: Group) -> dict[str, Any]:
    return {
        "label": label(group.key),
        "options": dict(group.options),
        "seconds_per_round": asdict(group.seconds),
        "samples": [process.seconds.tolist() for process in group.processes],
        "phase_seconds": group.phase_seconds,
        "peak_memory": group.peak_memory,
        "runs": [run_summary(run) for run in group.seeds],
    }


def _noise(noise: Noise) -> dict[str, Any]:
    return {
        "label": label(noise.group.key),
        "options": dict(noise.group.options),
        "variation_of_repeats": noise.variation,
        "drift_within_runs": noise.drift,
    }


def _scaling(one: Scaling) -> dict[str, Any]:
    fields = asdict(one)
    names = ("kind", "ranks", "seconds", "speedup", "efficiency")
    name = scaling_label(one.key, one.kind, one.clients)
    return {
        "name": name,
        **{field: fields[field] for field in names},
        "ideal": one.ideal,
    }


def _cost_model(one: Fitted) -> dict[str, Any]:
    fields = asdict(one)
    names = ("points", "model", "held_out")
    return {"name": label(one.key), **{field: fields[field] for field in names}}


def extrap_text(every: Sequence[Group]) -> str:
    """Return JSON Lines for Extra-P: each counted round is a repetition, phases are
    call paths.
    """
    lines = []
    for group in every:
        parameters = {"clients": group.clients, "ranks": group.ranks}
        name = label(group.key)
        for process in group.processes:
            for path, seconds in _call_paths(process).items():
                about = {"params": parameters, "callpath": f"{name}->{path}"}
                # Extra-P cannot read NaN.
                for value in seconds[np.isfinite(seconds)]:
                    line = about | {"metric": "time", "value": float(value)}
                    lines.append(json.dumps(line))
    return "\n".join(lines) + "\n"


def _call_paths(process: Process) -> dict[str, np.ndarray]:
    """Return the counted rounds' seconds, in total and by phase (means over ranks)."""
    paths = {"round": process.seconds}
    for number, phase in enumerate(PHASES):
        by_rank = process.phases[:, :, number]
        paths[f"round->{phase}"] = by_rank.mean(1)
    return paths
