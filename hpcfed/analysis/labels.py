"""Labels of choices of options. They are for people alone: nothing is looked up or put
together by a label.
"""

from typing import Any

from hpcfed import plugins
from hpcfed.analysis.choices import Combination
from hpcfed.errors import count
from hpcfed.options.metrics import global_name

ACCURACIES = {
    "accuracy": "clients, own test data",
    "global_accuracy": "global model, all test data",
}
"""Series of accuracies after a round, and whose they are on which data."""
ALL_ACCURACIES = {
    "accuracy": ACCURACIES["accuracy"],
    "trained_accuracy": "participants, after training",
    "global_accuracy": ACCURACIES["global_accuracy"],
}
"""All of them: participants are judged on their own test data, before aggregation."""


def both_series(metric: str) -> dict[str, str]:
    """Return the two series of a metric, and whose they are on which data."""
    return dict(zip((metric, global_name(metric)), ACCURACIES.values(), strict=True))


def all_series(metric: str) -> dict[str, str]:
    """Return every series of a metric, and whose they are; accuracy has three."""
    return ALL_ACCURACIES if metric == "accuracy" else both_series(metric)


def label(key: Combination) -> str:
    """Return `fedavg, dataset mnist, no supplement`: the method, then its options."""
    words = []
    # The method needs no name before it: everybody looks for it first. A comparison of
    # two methods leaves it out.
    if "method" in key:
        words.append(plugins.label(str(key["method"])))
    for name, value in key.without("method").items():
        words.append(option_text(name, value))
    return ", ".join(words)


def option_text(name: str, value: Any) -> str:
    """Return `lr 0.1`, `supplement` or `no supplement`."""
    if value == "":
        return f"no {name}"
    # Before numbers: a bool is one to Python.
    if isinstance(value, bool):
        return name if value else f"no {name}"
    if isinstance(value, float):
        return f"{name} {value:g}"
    return f"{name} {plugins.label(str(value))}"


def value_text(name: str, value: Any) -> str:
    """Return an option's value without its name before it."""
    if value == "":
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return option_text(name, value).removeprefix(f"{name} ")


def ranks_label(key: Combination, ranks: int) -> str:
    """Return the label of a choice on a number of ranks."""
    return f"{label(key)}, {count(ranks, 'rank')}"


def scaling_label(key: Combination, kind: str, clients: float) -> str:
    """Return the label of what stays the same while the ranks change."""
    name = label(key)
    if kind == "strong":
        return f"{name}: {clients:.0f} clients"
    return f"{name}: {clients:g} clients per rank"


def size_text(clients: float, ranks: int) -> str:
    """Return `20 clients on 2 ranks`."""
    number = f"{clients:,.0f}"
    clients_text = "1 client" if number == "1" else f"{number} clients"
    return f"{clients_text} on {count(ranks, 'rank')}"
