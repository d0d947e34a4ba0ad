"""A run as JSON: what `hpcfed show --json` prints, and what reports contain."""

from typing import Any

from hpcfed.options.metrics import global_name
from hpcfed.results.json_values import number, numbers, plain
from hpcfed.results.run import RunRecord, mean_accuracy
from hpcfed.results.series import series_of

_SUMMARY_FACTS = ("method", "dataset", "clients", "ranks", "seed", "model", "columns")


def run_summary(run: RunRecord) -> dict[str, Any]:
    """Return the run as JSON values, with NaN and infinite numbers as null."""
    # The config and the environment come last because they are longest.
    reached = run.reached()
    phases = run.phase_seconds()
    return {
        "folder": str(run.folder),
        "status": run.status,
        "error": run.error or None,
        "rounds_done": run.rounds_done,
        **{key: run.facts[key] for key in _SUMMARY_FACTS},
        "stacked_seeds": run.stacked_seeds,
        "partition": run.config["partition"],
        **_series(run),
        "best_accuracy": number(run.best("accuracy")),
        "best_trained_accuracy": number(run.best("trained_accuracy")),
        "best_global_accuracy": number(run.best("global_accuracy")),
        **_metric_figures(run),
        "target_accuracy": run.target,
        "reached_target": None if reached is None else plain(vars(reached)),
        "client_accuracy": numbers(run.last_client_accuracy),
        "seconds_per_phase": plain(phases),
        "seconds_of_phases": plain(run.phase_totals()),
        "moves": list(run.moves),
        "rounds_to_95_percent_of_peak": run.rounds_to(0.95),
        **_late_figures(run),
        "newcomer_bytes": number(run.newcomer_bytes),
        "printed_comm": number(run.printed_comm()),
        "server": [plain(vars(learning)) for learning in run.learnings],
        "peak_memory": numbers(run.peak_memory),
        "energy": None if run.energy is None else number(run.energy),
        "cpu_energy": (None if run.cpu_energy is None else number(run.cpu_energy)),
        "config": plain(run.config),
        "environment": plain(run.environment),
    }


def _series(run: RunRecord) -> dict[str, list[float | None]]:
    """Return the figures of all rounds, each series by its JSON name."""
    found = {}
    for name, values in run.rounds.items():
        found[series_of(name).key] = numbers(values)
    return found


def _metric_figures(run: RunRecord) -> dict[str, Any]:
    """Return the best values of further metrics and the last accuracies by class, if
    the run has them.
    """
    figures: dict[str, Any] = {}
    for name in run.metrics:
        for series in (name, global_name(name)):
            figures[f"best_{series}"] = number(run.best(series))
    if run.class_accuracy:
        last = run.last_class_accuracy().items()
        figures["class_accuracy"] = {name: numbers(values) for name, values in last}
    return figures


def _late_figures(run: RunRecord) -> dict[str, Any]:
    """Return the mean accuracies at the end, and those of new clients."""
    finals, figures = {}, {}
    for name, accuracy in run.finals.items():
        finals[name] = number(mean_accuracy(accuracy))
    for name, values in run.figures.items():
        figures[name] = number(mean_accuracy(values))
    updates, first, last = {}, {}, {}
    for start, accuracy in run.newcomers.items():
        updates[start] = [number(mean_accuracy(update)) for update in accuracy]
        first[start] = number(run.newcomers_first(start))
        last[start] = number(run.newcomers_last(start))
    return {
        "finals": finals,
        "figures": figures,
        "newcomers": updates,
        "newcomers_first": first,
        "newcomers_last_10": last,
        **_new_figures(run),
    }


def _new_figures(run: RunRecord) -> dict[str, Any]:
    """Return the curves of new clients' rounds, if the run has them."""
    rounds = run.new_rounds
    if rounds is None:
        return {}
    figures: dict[str, Any] = {}
    for name in ("accuracy", "trained_accuracy"):
        figures[name] = numbers(rounds.curve(name))
        figures[f"{name}_last_10"] = number(rounds.last(name))
    figures["bytes_up"] = numbers(rounds.bytes_up)
    figures["bytes_down"] = numbers(rounds.bytes_down)
    return {"new_rounds": figures}
