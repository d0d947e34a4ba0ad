"""The figures for other programs: CSV of every round, JSON of what the page shows, and Extra-P's input."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from hpcfed.record.reading import plain
from hpcfed.record.results import ROUND_SERIES
from hpcfed.record.timing import PHASES
from hpcfed.study.collect import Group, Sample, scalings
from hpcfed.study.sections import fitted

ABOUT = ("source", "options", "method", "dataset", "clients", "ranks", "columns", "seed", "stacked_seeds", "counted")


def csv_text(every: Sequence[Group]) -> str:
    """A line for every run, round and rank; a round's series stand on the lines of all its ranks."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    phases = [f"{phase}_seconds" for phase in PHASES]
    writer.writerow([*ABOUT, "round", *ROUND_SERIES, "rank", "rank_seconds", *phases])
    for group in every:
        for sample in group.samples:
            writer.writerows(_rows(group, sample))
    return text.getvalue()


def _rows(group: Group, sample: Sample) -> Iterator[list[Any]]:
    for run in sample.runs:
        facts = [run.facts[name] for name in ("method", "dataset", "clients", "ranks", "columns", "seed")]
        for round in range(run.rounds_done):
            counted = int(round >= run.rounds_done - len(sample.seconds))
            about = [sample.source, group.label, *facts, run.stacked_seeds, counted, round + 1]
            series = [run.rounds[name][round] for name in ROUND_SERIES]
            for rank in range(run.wall.shape[1]):
                yield [*about, *series, rank, run.wall[round, rank], *run.phases[round, rank]]


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
    """JSON Lines as Extra-P reads them: every counted round is a repetition, phases are call paths."""
    lines = []
    for group in every:
        parameters = {"clients": group.clients, "ranks": group.ranks}
        for sample in group.samples:
            paths = {"round": sample.seconds}
            paths |= {f"round->{name}": sample.phases[:, :, i].mean(1) for i, name in enumerate(PHASES)}
            for path, values in paths.items():
                for value in values[np.isfinite(values)]:
                    line = {"params": parameters, "callpath": f"{group.label}->{path}", "metric": "time"}
                    lines.append(json.dumps(line | {"value": float(value)}))
    return "\n".join(lines) + "\n"
