"""The figures for other programs: CSV of every round, JSON of what the page shows, and
Extra-P's input.
"""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from hpcfed.record.reading import RunRecord, plain
from hpcfed.record.series import ROUND_SERIES
from hpcfed.record.timing import PHASES
from hpcfed.report.collect import Group, Sample, scalings
from hpcfed.report.sections import fitted

ABOUT = (
    "source",
    "options",
    "method",
    "dataset",
    "clients",
    "ranks",
    "columns",
    "seed",
    "stacked_seeds",
    "counted",
)
SECONDS = [f"{phase}_seconds" for phase in PHASES]
"""Columns of phases."""


def csv_text(every: Sequence[Group]) -> str:
    """A line for every round of every run, with a column for each option that differs;
    phases are means over ranks.
    """
    head = [*ABOUT, "round", *ROUND_SERIES, *SECONDS]
    swept = _swept(every, known=head)
    at = len(ABOUT)
    lines = [[*head[:at], *swept, *head[at:]]]
    for group in every:
        values = [_cell(group.options.get(name)) for name in swept]
        for sample in group.samples:
            for run in sample.runs:
                lines += _rounds(group, sample, run, values)
    return _csv(lines)


def ranks_csv_text(every: Sequence[Group]) -> str:
    """A line for every rank of every round; source, seed and round say which line of
    `csv_text` it belongs to.
    """
    lines: list[list[Any]] = [
        ["source", "seed", "round", "rank", "rank_seconds", *SECONDS]
    ]
    for sample in (sample for group in every for sample in group.samples):
        for run in sample.runs:
            for round, rank in np.ndindex(*run.wall.shape):
                which = [sample.source, run.facts["seed"], round + 1, rank]
                lines.append([*which, run.wall[round, rank], *run.phases[round, rank]])
    return _csv(lines)


def _swept(every: Sequence[Group], known: Sequence[str]) -> list[str]:
    """Options in which the groups differ, without those that have a column already."""
    names = dict.fromkeys(
        name for group in every for name in group.options if name not in known
    )
    return [
        name
        for name in names
        if len({json.dumps(group.options.get(name)) for group in every}) > 1
    ]


def _cell(value: Any) -> Any:
    """An option's value as a cell: lists as JSON, nothing where a method has no such
    option.
    """
    return json.dumps(value) if isinstance(value, list | dict) else value


def _rounds(
    group: Group, sample: Sample, run: RunRecord, swept: Sequence[Any]
) -> Iterator[list[Any]]:
    facts = [
        run.facts[name]
        for name in ("method", "dataset", "clients", "ranks", "columns", "seed")
    ]
    for round in range(run.rounds_done):
        counted = int(round >= run.rounds_done - len(sample.seconds))
        about = [sample.source, group.label, *facts, run.stacked_seeds, counted]
        series = [run.rounds[name][round] for name in ROUND_SERIES]
        yield [*about, *swept, round + 1, *series, *run.phases[round].mean(0)]


def _csv(lines: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def json_text(every: Sequence[Group]) -> str:
    content = {
        "groups": [_group(group) for group in every],
        "scaling": [asdict(one) for one in scalings(every)],
        "cost_models": [asdict(one) for one in fitted(every)],
    }
    return json.dumps(plain(content), indent=1, allow_nan=False)


def _group(group: Group) -> dict[str, Any]:
    return {
        "label": group.label,
        "options": group.options,
        "seconds_per_round": asdict(group.seconds),
        "samples": [sample.seconds.tolist() for sample in group.samples],
        "phase_seconds": group.phase_seconds,
        "peak_memory": group.peak_memory,
        "runs": [run.summary() for run in group.seeds],
    }


def extrap_text(every: Sequence[Group]) -> str:
    """JSON Lines as Extra-P reads them: every counted round is a repetition, phases are
    call paths.
    """
    lines = []
    for group in every:
        parameters = {"clients": group.clients, "ranks": group.ranks}
        for sample in group.samples:
            paths = {"round": sample.seconds}
            paths |= {
                f"round->{name}": sample.phases[:, :, i].mean(1)
                for i, name in enumerate(PHASES)
            }
            for path, values in paths.items():
                for value in values[np.isfinite(values)]:
                    line = {
                        "params": parameters,
                        "callpath": f"{group.label}->{path}",
                        "metric": "time",
                    }
                    lines.append(json.dumps(line | {"value": float(value)}))
    return "\n".join(lines) + "\n"
