"""JSON: untrusted files of it, figures as its values, and a run as one object, which is
what `hpcfed show --json` prints and reports contain.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from hpcfed.options.metrics import global_name
from hpcfed.results.run import RunRecord, mean_accuracy
from hpcfed.results.safe import check_file
from hpcfed.results.series import series_of
from hpcfed.results.target import Reached

MOST_DEPTH = 32
"""Deepest nesting of JSON to read."""
_SUMMARY_FACTS = ("method", "dataset", "clients", "ranks", "seed", "model", "columns")


def read_json(path: Path, kind: Any, most: int) -> Any:
    """Read JSON of at most `most` bytes as this type; raise OSError or ValueError."""
    check_file(path, most)
    return TypeAdapter(kind).validate_python(_loaded(path.read_text()))


def parsed(text: str) -> dict[str, Any]:
    """Parse a JSON object; raise a ValueError for anything else."""
    found = _loaded(text)
    if not isinstance(found, dict):
        raise ValueError("its JSON is not an object")
    return found


def _loaded(text: str) -> Any:
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    _check_depth(found)
    # Encoding rejects lone surrogates, which cannot be printed.
    json.dumps(found, ensure_ascii=False).encode()
    return found


def _check_depth(value: Any) -> None:
    """Refuse JSON nested so deeply that recursive code could not walk it."""
    # Level by level: recursion here would fail on what it should refuse.
    level = [value]
    for _ in range(MOST_DEPTH):
        below: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                below += one.values()
            elif isinstance(one, list):
                below += one
        if not below:
            return
        level = below
    raise ValueError("its JSON is nested too deeply")


def plain(value: Any) -> Any:
    """Return a value that JSON can represent: NaN and infinite numbers become null."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return [_number(item) for item in value]
    # JSON does not know numpy's number types.
    if isinstance(value, np.generic):
        value = value.item()
    return _number(value) if isinstance(value, float) else value


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def run_summary(run: RunRecord) -> dict[str, Any]:
    """Return the run as JSON values, with NaN and infinite numbers as null."""
    # The config and the environment come last because they are longest.
    found: dict[str, Any] = {
        "folder": str(run.folder),
        "status": run.status,
        "error": run.error or None,
        "rounds_done": run.rounds_done,
        **{key: run.facts[key] for key in _SUMMARY_FACTS},
        "stacked_seeds": run.stacked_seeds,
        "stacked_seeds_of_rounds": run.stacks,
        "partition": run.config["partition"],
        **{series_of(name).key: values for name, values in run.rounds.items()},
        "best_accuracy": run.best("accuracy"),
        "best_trained_accuracy": run.best("trained_accuracy"),
        "best_global_accuracy": run.best("global_accuracy"),
        **_metric_figures(run),
        "target_accuracy": run.target,
        "reached_target": _cost(run.reached()),
        "stays_at_target": _cost(run.stays()),
        "ended_at_target": run.ended_at_target,
        "client_accuracy": run.last_client_accuracy,
        "seconds_per_phase": run.phase_seconds(),
        "seconds_of_phases": run.phase_totals(),
        "moves": run.moves,
        "rounds_to_95_percent_of_peak": run.rounds_to(0.95),
        "finals": _means(run.finals),
        "figures": _means(run.figures),
        **_depths(run),
        **_newcomers(run),
        "newcomer_bytes": run.newcomer_bytes,
        "printed_comm": run.printed_comm(),
        "server": [vars(learning) for learning in run.learnings],
        "peak_memory": run.peak_memory,
        "energy": run.energy,
        "cpu_energy": run.cpu_energy,
        "config": run.config,
        "environment": run.environment,
    }
    return {name: plain(value) for name, value in found.items()}


def _cost(reached: Reached | None) -> dict[str, Any] | None:
    return None if reached is None else vars(reached)


def _metric_figures(run: RunRecord) -> dict[str, Any]:
    """Return the best further metrics and the last accuracies by class, if any."""
    figures: dict[str, Any] = {}
    for name in run.metrics:
        for series in (name, global_name(name)):
            figures[f"best_{series}"] = run.best(series)
    if run.class_accuracy:
        figures["class_accuracy"] = run.last_class_accuracy()
    return figures


def _means(by_name: dict[str, Any]) -> dict[str, float]:
    """Return the mean over clients of each entry."""
    return {name: mean_accuracy(values) for name, values in by_name.items()}


def _depths(run: RunRecord) -> dict[str, Any]:
    """Return what the server makes from several depths, as means over clients."""
    sweep = run.depths
    if sweep is None:
        return {}
    found = {"depth": sweep.depth, "signal": sweep.signal, **sweep.means()}
    return {"depths": found}


def _newcomers(run: RunRecord) -> dict[str, Any]:
    """Return new clients' mean accuracies by their start, and their rounds, if any."""
    starts = run.newcomers
    found: dict[str, Any] = {
        "newcomers": {name: [*map(mean_accuracy, starts[name])] for name in starts},
        "newcomers_first": {name: run.newcomers_first(name) for name in starts},
        "newcomers_last_10": {name: run.newcomers_last(name) for name in starts},
    }
    rounds = run.new_rounds
    if rounds is not None:
        curves: dict[str, Any] = {}
        for name in ("accuracy", "trained_accuracy"):
            curves[name] = rounds.curve(name)
            curves[f"{name}_last_10"] = rounds.last(name)
        curves |= {"bytes_up": rounds.bytes_up, "bytes_down": rounds.bytes_down}
        found["new_rounds"] = curves
    return found
