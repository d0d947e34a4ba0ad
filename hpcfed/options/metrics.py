"""What `--metrics` may name: one table, from which series, checks and labels follow.

Each metric is taken twice: as the mean over clients of what each client's own model
reaches on its own test data, and of the global model on the whole test set.
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
    """What `--metrics` takes, and what the series of rounds is called."""
    label: str
    """What tables and charts call it; see `label_of`."""
    unit: str
    meaning: str
    tasks: tuple[str, ...]
    pooled: bool = False
    """Whether it follows from all clients' answers together: no client has one."""
    lower_is_better: bool = False

    @property
    def in_percent(self) -> bool:
        """Whether people read it in per cent."""
        return self.unit == "fraction"


PER_CLASS = "per-class"
"""An accuracy for every class, which is no series of single figures."""

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
"""Metrics that are one figure a round."""
USUAL = {
    "classification": ("accuracy",),
    "next-token": ("accuracy", "perplexity"),
    "regression": ("loss", "r2"),
}
"""Metrics of each task where the user names none."""
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
    """Return the metrics of a run: those asked for, or the task's usual ones.

    Accuracy is always among them where the task has it.
    """
    names = USUAL[task] if asked is None else tuple(asked)
    if task in METRICS["accuracy"].tasks and "accuracy" not in names:
        return ("accuracy", *names)
    return names


def label_of(name: str, task: str) -> str:
    """Return what tables and charts call a metric of a task."""
    if name == "loss":
        return "mean squared error" if task == "regression" else "cross-entropy"
    return METRICS[name].label


def text_of(name: str, value: float) -> str:
    """Return a metric's value as people read it."""
    return f"{value:.2%}" if METRICS[name].in_percent else f"{value:.4g}"


def of_clients(names: Sequence[str]) -> list[str]:
    """Return those metrics of which every client has its own."""
    return [name for name in names if not METRICS[name].pooled]


def metric_of(series: str) -> str:
    """Return the name of the metric that a series of rounds has."""
    return series.removeprefix("global_").removeprefix("trained_")


def global_name(name: str) -> str:
    """Return what the global model's series of a metric is called."""
    return f"global_{name}"
