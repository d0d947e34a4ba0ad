"""Where run.h5 has metrics: by round, by client that is evaluated, and by class."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hpcfed.options.metrics import METRICS, PER_CLASS, of_clients
from hpcfed.results.series import metric_series

CLASS_SERIES = {
    "accuracy": "clients on their own test data, taken together",
    "global_accuracy": "global model on the whole test set",
}
"""Accuracies of classes, and whose they are."""


class MetricArray(NamedTuple):
    """A dataset of run.h5."""

    name: str
    shape: tuple[int, ...]
    dimensions: tuple[str, ...]
    unit: str
    meaning: str
    dtype: str = "f8"


def metric_arrays(
    metrics: Sequence[str], rounds: int, clients: int, classes: int
) -> Iterator[MetricArray]:
    """Yield the datasets for these metrics of so many clients that are evaluated."""
    shape = (rounds, clients)
    # Every file has it, also where there is no accuracy.
    yield MetricArray(
        "clients/accuracy",
        shape,
        ("round", "client"),
        "fraction",
        "accuracy on the client's own test data; NaN: not evaluated, or no test data",
        "f4",
    )
    for name in of_clients(metrics):
        if name != "accuracy":
            unit, meaning = METRICS[name].unit, METRICS[name].meaning
            meaning = f"on the client's own test data: {meaning}"
            where = f"clients/{name}"
            yield MetricArray(where, shape, ("round", "client"), unit, meaning, "f4")
    for series in metric_series(metrics):
        where = f"rounds/{series.name}"
        yield MetricArray(where, (rounds,), ("round",), series.unit, series.meaning)
    if PER_CLASS in metrics:
        for name, whose in CLASS_SERIES.items():
            yield MetricArray(
                f"classes/{name}",
                (rounds, classes),
                ("round", "class"),
                "fraction",
                f"accuracy of each class: {whose}",
            )
