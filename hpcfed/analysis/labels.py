"""Labels of points, and figures with their intervals, for use in sentences.

They are only for display: nothing is looked up or grouped by a label.
"""

import json
from collections.abc import Sequence
from typing import Any

from hpcfed import plugins
from hpcfed.analysis.choices import Combination
from hpcfed.analysis.statistics import Estimate
from hpcfed.errors import count
from hpcfed.options.metrics import global_name
from hpcfed.results.run import RunRecord
from hpcfed.words import formatted, interval, number

MOST_SENTENCES = 4
"""Most sentences for one question; the section's table has all."""
IN_PERCENT = (" %", " points")
"""Units shown with one decimal."""
ACCURACIES = {
    "accuracy": "clients, own test data",
    "global_accuracy": "global model, all test data",
}
"""Series of accuracies after a round, with their model and test data."""
ALL_ACCURACIES = {
    "accuracy": ACCURACIES["accuracy"],
    "trained_accuracy": "participants, after training",
    "global_accuracy": ACCURACIES["global_accuracy"],
}
"""All of them: participants are judged on their own test data, before aggregation."""


def both_series(metric: str) -> dict[str, str]:
    """Return the two series of a metric, with their model and test data."""
    return dict(zip((metric, global_name(metric)), ACCURACIES.values(), strict=True))


def all_series(metric: str) -> dict[str, str]:
    """Return all series of a metric, with their model; accuracy has three."""
    return ALL_ACCURACIES if metric == "accuracy" else both_series(metric)


def label(key: Combination) -> str:
    """Return `fedavg, dataset mnist, no supplement`: the method, then its options."""
    words = []
    # The method comes first and without its name, because readers look for it first. A
    # comparison of two methods leaves it out.
    if "method" in key:
        words.append(plugins.label(str(key["method"])))
    for name, value in key.without("method").items():
        words.append(option_text(name, value))
    return ", ".join(words)


def option_text(name: str, value: Any) -> str:
    """Return `lr 0.1`, `supplement` or `no supplement`."""
    if value == "":
        return f"no {name}"
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{name} {value_text(value)}"


def value_text(value: Any) -> str:
    """Return an option's value as people write it, without its name."""
    if value is None or value == "":
        return "none"
    # Before numbers, because in Python a bool is an int.
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | dict):
        return json.dumps(value)
    return plugins.label(str(value))


def ranks_label(key: Combination, ranks: int) -> str:
    """Return the label of a choice with its number of ranks."""
    return f"{label(key)}, {count(ranks, 'rank')}"


def scaling_label(key: Combination, kind: str, clients: float) -> str:
    """Return the label of what stays fixed while the ranks change."""
    name = label(key)
    if kind == "strong":
        return f"{name}: {clients:.0f} clients"
    return f"{name}: {clients:g} clients per rank"


def size_text(clients: float, ranks: int) -> str:
    """Return `20 clients on 2 ranks`."""
    number = f"{clients:,.0f}"
    clients_text = "1 client" if number == "1" else f"{number} clients"
    return f"{clients_text} on {count(ranks, 'rank')}"


def condition_text(condition: Combination) -> str:
    """Return `digits, 20 clients, alpha 0.1`, with the parts that it has."""
    words = []
    for name, value in condition.items():
        if name == "dataset":
            words.append(plugins.label(str(value)))
        elif name == "clients":
            words.append(count(int(value), "client"))
        elif value is not None:  # None for methods without the option
            words.append(option_text(name, value))
    return ", ".join(words)


def times_text(estimate: Estimate, unit: str = "", scale: float = 1.0) -> str:
    """Return a figure of times like `text`, but without an interval that is vague."""
    if not estimate.vague:
        return text(estimate, unit, scale)
    alone = text(Estimate(estimate.centre), unit, scale)
    return f"{alone} (by the mean; too few repeats for an interval)"


def text(estimate: Estimate, unit: str = "", scale: float = 1.0) -> str:
    """Return `12.3 % [11.8, 12.9]`, for use in a sentence."""
    write = formatted(",.1f") if unit in IN_PERCENT else number
    return interval(estimate, scale, write, unit)


def few(sentences: Sequence[str], of: str) -> list[str]:
    """Return the first sentences, and say how many more the table has."""
    shown = list(sentences[:MOST_SENTENCES])
    left = len(sentences) - len(shown)
    if left:
        shown.append(f"The table has {count(left, f'more {of}')}.")
    return shown


def server_text(run: RunRecord) -> str:
    """Return `49 s once`: the average time of a rank in the phase `server`, in the rounds
    whose times count.
    """
    seconds = run.phase_totals()["server"]
    times = sum(one.round >= run.untimed for one in run.learnings)
    rounds = run.rounds_done - run.untimed
    often = "once" if times == 1 else f"in {times} of {rounds} rounds"
    return f"{number(seconds)} s {often}"
