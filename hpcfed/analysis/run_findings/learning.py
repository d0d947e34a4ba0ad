"""How good a run's models are: after its rounds, at its end, and for new clients."""

from collections.abc import Callable, Iterator, Sequence
from math import isfinite, isnan, nan, sqrt
from statistics import mean, stdev

import numpy as np

from hpcfed.analysis.findings import (
    BYTES,
    COUNT,
    PERCENT,
    PLAIN,
    SECONDS,
    SHARE,
    THOUSANDTHS,
    TIME,
    Cell,
    Kind,
    Row,
    Table,
)
from hpcfed.analysis.labels import ACCURACIES, all_series
from hpcfed.errors import count
from hpcfed.options.metrics import METRICS, chosen, label_of, text_of
from hpcfed.results.run import LAST_UPDATES, NewRounds, RunRecord, mean_accuracy
from hpcfed.results.target import Reached

Runs = Sequence[RunRecord]
"""A run, or its seeds that advanced together."""
MOST_CLASSES = 20
"""Most classes in a table; of more, those with the lowest accuracy."""
FEWEST = 3
"""Fewest clients for a distribution."""
ERROR = "mean ± standard error"


def metric_kind(metric: str) -> Kind:
    """Return how values of a metric are displayed."""
    unit = "fraction" if METRICS[metric].in_percent else METRICS[metric].unit
    return Kind(unit, lambda value: text_of(metric, value))


# Tables of a single run.


def learning_of_run(record: RunRecord) -> Iterator[Table]:
    """Yield what a run has reached, most wanted tables first."""
    head = ("last", "best")
    # Tasks without an accuracy have other metrics.
    if record.task in METRICS["accuracy"].tasks:
        rows = list(_last_and_best(record, "accuracy"))
        for name, accuracies in record.finals.items():
            judged = PERCENT(mean_accuracy(accuracies))
            rows.append([f"at the end: {name}", judged, ""])
        yield Table(("accuracy", *head), rows)
    if record.metrics:
        rows = []
        for name in record.metrics:
            label = label_of(name, record.task)
            rows += _last_and_best(record, name, f"{label}: ")
        yield Table(("metric", *head), rows)
    if record.class_accuracy:
        yield from _class_accuracy(record)
    rows = []
    # What the method has measured about clients.
    for name, values in record.figures.items():
        known = values[~np.isnan(values)]
        figures = [float(of(known)) for of in (np.mean, np.min, np.max)]
        rows.append([name, *map(THOUSANDTHS, figures)])
    if rows:
        yield Table(("at the end, over clients", "mean", "least", "most"), rows)
    if record.target is not None:
        yield _target([record])
    if record.newcomers:
        yield _newcomers(record)
    if record.new_rounds is not None:
        yield _new_rounds(record.new_rounds)


def _last_and_best(record: RunRecord, metric: str, label: str = "") -> Iterator[Row]:
    """Yield a row for each known series of a metric."""
    kind = metric_kind(metric)
    for series, whose in all_series(metric).items():
        last = record.last(series)
        if not isnan(last):
            yield [label + whose, kind(last), kind(record.best(series))]


def _class_accuracy(record: RunRecord) -> Iterator[Table]:
    """Yield the last accuracy of each class, or of the classes with the lowest."""
    last = record.last_class_accuracy()
    values = [last[name] for name in ACCURACIES if name in last]
    if not values:
        return
    # By the global model, if there is one; NaN comes last.
    hardest = np.sort(np.argsort(values[-1])[:MOST_CLASSES])
    rows: list[Row] = []
    for number in hardest:
        cells = [PERCENT(float(of_classes[number])) for of_classes in values]
        rows.append([str(number), *cells])
    columns = [whose for name, whose in ACCURACIES.items() if name in last]
    classes = len(values[-1])
    caption = ""
    if classes > MOST_CLASSES:
        caption = f"the {MOST_CLASSES} classes with the lowest accuracy of {classes}"
    yield Table(("accuracy of class", *columns), rows, caption)


def _newcomers(record: RunRecord) -> Table:
    """Return a row for each local update: a column for each would not fit."""
    rows: list[Row] = []
    updates = zip(*record.newcomers.values(), strict=True)
    for update, by_start in enumerate(updates):
        means = [PERCENT(mean_accuracy(accuracies)) for accuracies in by_start]
        rows.append([f"after {count(update, 'local update')}", *means])
    if len(rows) > LAST_UPDATES + 1:
        last = [PERCENT(record.newcomers_last(start)) for start in record.newcomers]
        rows.append([f"mean of the last {LAST_UPDATES}", *last])
    return Table(("new clients that start from", *record.newcomers), rows)


def _new_rounds(rounds: NewRounds) -> Table:
    """Return a row for each evaluated round of new clients."""
    series = ("accuracy", "trained_accuracy")
    curves = [rounds.curve(name).tolist() for name in series]
    rows: list[Row] = []
    for number, means in enumerate(zip(*curves, strict=True), 1):
        if not all(map(isnan, means)):
            rows.append([f"after round {number}", *map(PERCENT, means)])
    last = [PERCENT(rounds.last(name)) for name in series]
    # There may be fewer rounds, and --evaluate-every leaves some out.
    evaluated = max(len(rounds.latest(name)) for name in series)
    rows.append([f"mean of the last {evaluated}", *last])
    return Table(("new clients", "as they stand", "after training"), rows)


# Tables of several seeds.


def learning_of_seeds(runs: Runs) -> Iterator[Table]:
    """Yield what each seed has reached, and the mean."""
    first = runs[0]
    for metric in chosen(first.metrics, first.task):
        label = label_of(metric, first.task)
        yield _by_seed(metric, f"last {label}", runs, RunRecord.last)
        yield _by_seed(metric, f"best {label}", runs, RunRecord.best)
    if first.target is not None:
        yield _target(runs)
    if first.finals:
        yield _finals(runs)
    rows: list[Row] = []
    for name in first.figures:
        # A seed that has not ended yet has none.
        having = [run.figures[name] for run in runs if name in run.figures]
        rows.append([name, THOUSANDTHS(mean(map(mean_accuracy, having)))])
    if rows:
        yield Table(("at the end, over clients", "mean of all seeds"), rows)


def _by_seed(
    metric: str, head: str, runs: Runs, figure: Callable[[RunRecord, str], float]
) -> Table:
    """Return a figure of each seed, without columns that are unknown throughout."""
    columns = {}
    for series, whose in all_series(metric).items():
        values = [figure(run, series) for run in runs]
        if not all(map(isnan, values)):
            columns[whose] = values
    kind = metric_kind(metric)
    rows: list[Row] = []
    for number, run in enumerate(runs):
        cells = [kind(values[number]) for values in columns.values()]
        rows.append([f"seed {run.facts['seed']}", *cells])
    if len(runs) > 1:
        rows.append([ERROR, *(_mean(values, metric) for values in columns.values())])
    return Table((head, *columns), rows)


def _mean(values: Sequence[float], metric: str = "accuracy") -> Cell:
    """Return the mean of a metric over seeds, with its standard error."""
    kind = metric_kind(metric)
    # The loss of a seed may be infinite; then the mean is, too.
    if len(values) < 2 or not all(map(isfinite, values)):
        return kind(mean(values))
    error = stdev(values) / sqrt(len(values))
    text = f"{mean(values):.4g} ± {error:.2g}"
    if METRICS[metric].in_percent:
        text = f"{mean(values):.2%} ± {100 * error:.2f}"
    return kind(mean(values), text, error=error)


def _finals(runs: Runs) -> Table:
    """Return the method's final evaluations."""
    rows: list[Row] = []
    for name in runs[0].finals:
        # A seed that has not ended yet has none.
        having = [run.finals[name] for run in runs if name in run.finals]
        rows.append([name, _mean(list(map(mean_accuracy, having)))])
    head = "mean" if len(runs) == 1 else ERROR
    return Table(("at the end, clients' own test data", head), rows)


# The target, for one run or for seeds.


def _target(runs: Runs) -> Table:
    """Return the cost of reaching the target, with a mean only if all seeds did, and the
    round from which on the run stays there.
    """
    columns = ["rounds", "seconds", "sent"]
    if runs[0].has_clock:
        columns.append("virtual time")
    rows: list[Row] = []
    every, staying = [], []
    for run in runs:
        reached = run.reached()
        seed = "" if len(runs) == 1 else f"seed {run.facts['seed']}"
        if reached is None:
            name = f"{seed}: not reached" if seed else "not reached"
            rows.append([name, *("" for _ in columns), ""])
            continue
        every.append(reached)
        stays = run.stays()
        if stays is not None:
            staying.append(stays.rounds)
        cells = [*_target_cells(reached), _stays_cell(run)]
        rows.append([seed or "reached after", *cells])
    # A mean only over the seeds that reached it would flatter the others.
    if 1 < len(every) == len(runs):
        all_stay = len(staying) == len(runs)
        mean_stays = _mean_rounds(staying) if all_stay else ""
        rows.append([ERROR, *_mean_target_cells(every), mean_stays])
    return Table(
        (f"target of {runs[0].target:g} %", *columns, "stays from round"), rows
    )


def _target_cells(reached: Reached) -> list[Cell]:
    cells = [COUNT(reached.rounds), SECONDS(reached.seconds), BYTES(reached.bytes)]
    if not isnan(reached.virtual_seconds):
        cells.append(TIME(reached.virtual_seconds))
    return cells


def _stays_cell(run: RunRecord) -> Cell:
    """Return the round from which on a run that has reached its target stays there."""
    stays = run.stays()
    if stays is not None:
        return COUNT(stays.rounds)
    return COUNT(
        nan, "unknown: it ended there" if run.ended_at_target else "lost again"
    )


def _mean_rounds(rounds: Sequence[int]) -> Cell:
    error = stdev(rounds) / sqrt(len(rounds))
    return COUNT(mean(rounds), f"{mean(rounds):.1f} ± {error:.1f}", error=error)


def _mean_target_cells(every: Sequence[Reached]) -> list[Cell]:
    rounds = [reached.rounds for reached in every]
    means = Reached(
        round(mean(rounds)),
        mean(reached.seconds for reached in every),
        mean(reached.bytes for reached in every),
        mean(reached.virtual_seconds for reached in every),
    )
    return [_mean_rounds(rounds), *_target_cells(means)[1:]]


# Tables over clients.


def last_of_clients(runs: Runs) -> np.ndarray:
    """Return the last known accuracies of all clients of all seeds."""
    values = np.concatenate([run.last_client_accuracy for run in runs])
    return values[np.isfinite(values)]


def worst_tenth(values: np.ndarray) -> float:
    """Return the mean of the lowest tenth, but of at least one client."""
    few = max(1, len(values) // 10)
    return float(np.sort(values)[:few].mean())


def client_figures(known: np.ndarray) -> dict[str, float]:
    """Return what a table and a chart say about the distribution of accuracies."""
    return {
        "mean": float(known.mean()),
        "first quartile": float(np.quantile(known, 0.25)),
        "mean of the worst tenth": worst_tenth(known),
        "worst client": float(known.min()),
        "standard deviation over clients": float(known.std()),
    }


def of_clients(runs: Runs) -> Iterator[Table]:
    """Yield the distribution of clients' last accuracies."""
    known = last_of_clients(runs)
    if len(known) >= FEWEST:
        figures = client_figures(known).items()
        rows: list[Row] = [[name, PERCENT(value)] for name, value in figures]
        yield Table(("clients' last accuracy", ""), rows)


def of_classes(counts: np.ndarray) -> Iterator[Table]:
    """Yield how training samples [clients, classes] are distributed over clients."""
    if not counts.size or not counts.any():
        return
    samples = counts.sum(1)
    # A client's largest class as a share of its samples: 1 if it has a single class.
    largest = counts.max(1)[samples > 0] / samples[samples > 0]
    rows: list[Row] = []
    for name, kind, values in (
        ("classes of a client", PLAIN, (counts > 0).sum(1)),
        ("samples of a client", PLAIN, samples),
        ("share of a client's largest class", SHARE, largest),
    ):
        three = (values.min(), values.mean(), values.max())
        rows.append([name, *(kind(float(value)) for value in three)])
    yield Table(("who has which classes", "least", "mean", "most"), rows)
