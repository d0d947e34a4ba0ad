"""The metrics of `--metrics`, in one table; series, checks and labels follow from it.

Each metric is computed twice: as the mean over clients of each client's own model on
its own test data, and for the global model on the whole test set.
"""

from collections.abc import Sequence
from dataclasses import dataclass

LABELLED = ("classification",)
WITH_ANSWERS = ("classification", "next-token")
ALL_TASKS = ("classification", "next-token", "regression")


@dataclass(frozen=True)
class Metric:
    """One way to judge a model on test data."""

    name: str
    """Its name in `--metrics` and in the series over rounds."""
    label: str
    """Its name in tables and charts; see `label_of`."""
    unit: str
    meaning: str
    tasks: tuple[str, ...]
    pooled: bool = False
    """Whether it is computed from all clients' predictions together, not per client."""
    lower_is_better: bool = False

    @property
    def in_percent(self) -> bool:
        """Whether it is shown in per cent."""
        return self.unit == "fraction"

    @property
    def scale(self) -> float:
        """Factor from its values to their display."""
        return 100.0 if self.in_percent else 1.0

    def axis(self, label: str) -> str:
        """Return a label with the unit of its displayed values."""
        return f"{label}, %" if self.in_percent else label


PER_CLASS = "per-class"
"""An accuracy for every class: several figures a round, so it is not in `SERIES`."""

_TABLE = (
    Metric("accuracy", "accuracy", "fraction", "share of right answers", WITH_ANSWERS),
    Metric(
        "loss",
        "loss",
        "1",
        "mean loss: cross-entropy in nats, or squared error",
        ALL_TASKS,
        lower_is_better=True,
    ),
    Metric(
        "top5",
        "top-5 accuracy",
        "fraction",
        "share of targets among the five likeliest answers",
        WITH_ANSWERS,
    ),
    Metric(
        "f1",
        "macro F1",
        "fraction",
        "mean over classes of the F1 score, from pooled counts of answers",
        LABELLED,
        pooled=True,
    ),
    Metric(
        PER_CLASS,
        "accuracy by class",
        "fraction",
        "share of right answers among the samples of a class",
        LABELLED,
        pooled=True,
    ),
    Metric(
        "perplexity",
        "perplexity",
        "1",
        "exponential of the mean cross-entropy of a token",
        ("next-token",),
        lower_is_better=True,
    ),
    Metric(
        "mae",
        "mean absolute error",
        "1",
        "mean absolute error of an output",
        ("regression",),
        lower_is_better=True,
    ),
    Metric(
        "r2",
        "R²",
        "1",
        "coefficient of determination, a mean over outputs",
        ("regression",),
    ),
)

METRICS = {metric.name: metric for metric in _TABLE}
"""Metrics by name."""
SERIES = [metric for metric in _TABLE if metric.name != PER_CLASS]
"""Metrics that have one figure a round."""
USUAL = {
    "classification": ("accuracy",),
    "next-token": ("accuracy", "perplexity"),
    "regression": ("loss", "r2"),
}
"""Default metrics of each task."""
HEADLINES = {
    "classification": "accuracy",
    "next-token": "perplexity",
    "regression": "loss",
}
"""The metric that the progress line shows."""


def fitting(task: str) -> list[str]:
    """Return the metrics that a task has."""
    return [name for name, metric in METRICS.items() if task in metric.tasks]


def chosen(asked: Sequence[str] | None, task: str) -> tuple[str, ...]:
    """Return the metrics asked for, or the usual ones, and accuracy if it exists."""
    names = USUAL[task] if asked is None else tuple(asked)
    if task in METRICS["accuracy"].tasks and "accuracy" not in names:
        return ("accuracy", *names)
    return names


def label_of(name: str, task: str) -> str:
    """Return the name of a metric in tables and charts."""
    if name == "loss":
        return "mean squared error" if task == "regression" else "cross-entropy"
    return METRICS[name].label


def text_of(name: str, value: float) -> str:
    """Format a metric's value for display."""
    return f"{value:.2%}" if METRICS[name].in_percent else f"{value:.4g}"


def of_clients(names: Sequence[str]) -> list[str]:
    """Return the metrics that are computed for each client."""
    return [name for name in names if not METRICS[name].pooled]


def metric_of(series: str) -> str:
    """Return the name of the metric in a series over rounds."""
    return series.removeprefix("global_").removeprefix("trained_")


def global_name(name: str) -> str:
    """Return the name of the global model's series of a metric."""
    return f"global_{name}"
