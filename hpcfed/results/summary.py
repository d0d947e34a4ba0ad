"""A run as JSON: what `hpcfed show --json` prints, and what reports contain."""

from typing import Any

from hpcfed.options.metrics import global_name
from hpcfed.results.json_values import plain
from hpcfed.results.run import RunRecord, mean_accuracy
from hpcfed.results.series import series_of

_SUMMARY_FACTS = ("method", "dataset", "clients", "ranks", "seed", "model", "columns")


def run_summary(run: RunRecord) -> dict[str, Any]:
    """Return the run as JSON values, with NaN and infinite numbers as null."""
    reached = run.reached()
    # The config and the environment come last because they are longest.
    found: dict[str, Any] = {
        "folder": str(run.folder),
        "status": run.status,
        "error": run.error or None,
        "rounds_done": run.rounds_done,
        **{key: run.facts[key] for key in _SUMMARY_FACTS},
        "stacked_seeds": run.stacked_seeds,
        "partition": run.config["partition"],
        **{series_of(name).key: values for name, values in run.rounds.items()},
        "best_accuracy": run.best("accuracy"),
        "best_trained_accuracy": run.best("trained_accuracy"),
        "best_global_accuracy": run.best("global_accuracy"),
        **_metric_figures(run),
        "target_accuracy": run.target,
        "reached_target": None if reached is None else vars(reached),
        "client_accuracy": run.last_client_accuracy,
        "seconds_per_phase": run.phase_seconds(),
        "seconds_of_phases": run.phase_totals(),
        "moves": run.moves,
        "rounds_to_95_percent_of_peak": run.rounds_to(0.95),
        "finals": _means(run.finals),
        "figures": _means(run.figures),
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


def _metric_figures(run: RunRecord) -> dict[str, Any]:
    """Return the best values of further metrics and the last accuracies by class, if
    the run has them.
    """
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
