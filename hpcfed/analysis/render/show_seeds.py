"""`hpcfed show` of several seeds of a run: the accuracy of each, and their mean with its
standard error.
"""

from collections.abc import Callable, Sequence
from math import isfinite, isnan, sqrt
from pathlib import Path
from statistics import mean, stdev

from rich.console import Console
from rich.table import Table

from hpcfed.analysis.labels import all_series
from hpcfed.analysis.render.console import bare_table, plain_text, say
from hpcfed.analysis.render.show import status, target_cells, target_table, title
from hpcfed.errors import count
from hpcfed.options.metrics import METRICS, label_of, text_of
from hpcfed.results.run import Reached, RunRecord, mean_accuracy


def show_seeds(records: Sequence[RunRecord], folder: Path, console: Console) -> None:
    """Print several seeds of a run, which lie in `folder`."""
    seeds = count(len(records), "seed")
    say(console, f"{title(records[0])}, {seeds} at once")
    # A dict, because the seeds' status is usually the same.
    statuses = dict.fromkeys(status(record) for record in records)
    say(console, *statuses, "")
    tables = []
    if records[0].task in METRICS["accuracy"].tasks:
        tables.append(_last("accuracy", "last accuracy", records))
    for name in records[0].metrics:
        label = label_of(name, records[0].task)
        tables.append(_last(name, f"last {label}", records))
    if records[0].target is not None:
        tables.append(_figures("accuracy", "best accuracy", records, RunRecord.best))
        tables.append(_target(records))
    if records[0].finals:
        tables.append(_finals(records))
    if records[0].figures:
        tables.append(_measured(records))
    for number, table in enumerate(tables):
        if number:
            console.print()
        console.print(table)
    # Seeds advance together; one that stopped early has fewer rounds.
    totals = [record.rounds["seconds"].sum() for record in records]
    seconds = float(max(totals))
    say(console, "", f"wall time of all rounds of all seeds: {seconds:.2f} s")
    names = ", ".join(record.folder.name for record in records)
    say(console, f"runs in {folder}: {names}")


def _last(metric: str, head: str, records: Sequence[RunRecord]) -> Table:
    return _figures(metric, head, records, RunRecord.last)


def _figures(
    metric: str,
    head: str,
    records: Sequence[RunRecord],
    figure: Callable[[RunRecord, str], float],
) -> Table:
    """Return a figure of every seed's values of a metric, without columns in which
    nothing is known.
    """
    columns = {}
    for series, whose in all_series(metric).items():
        values = [figure(record, series) for record in records]
        if not all(isnan(value) for value in values):
            columns[whose] = values
    table = bare_table(head, *columns)
    for number, record in enumerate(records):
        cells = [text_of(metric, values[number]) for values in columns.values()]
        table.add_row(f"seed {record.facts['seed']}", *cells)
    if len(records) > 1:
        means = [_mean_and_error(values, metric) for values in columns.values()]
        table.add_row("mean ± standard error", *means)
    return table


def _target(records: Sequence[RunRecord]) -> Table:
    """Return what every seed took to reach the target, and the mean only where all have
    reached it.
    """
    table = target_table(records[0])
    all_reached = []
    for record in records:
        seed = f"seed {record.facts['seed']}"
        reached = record.reached()
        if reached is None:
            table.add_row(f"{seed}: not reached")
            continue
        all_reached.append(reached)
        table.add_row(seed, *target_cells(reached))
    # A mean over those that reached it would flatter the others.
    if 1 < len(all_reached) == len(records):
        rounds = [reached.rounds for reached in all_reached]
        error = stdev(rounds) / sqrt(len(rounds))
        mean_seconds = mean([reached.seconds for reached in all_reached])
        mean_sent = mean([reached.bytes for reached in all_reached])
        virtual = mean([reached.virtual_seconds for reached in all_reached])
        means = Reached(round(mean(rounds)), mean_seconds, mean_sent, virtual)
        told = f"{mean(rounds):.1f} ± {error:.1f}"
        table.add_row("mean ± standard error", told, *target_cells(means)[1:])
    return table


def _finals(records: Sequence[RunRecord]) -> Table:
    """Return what the method had judged at the end."""
    head = "mean" if len(records) == 1 else "mean ± standard error"
    table = bare_table("at the end, clients' own test data", head)
    for name in records[0].finals:
        means = []
        for record in records:
            if name in record.finals:
                means.append(mean_accuracy(record.finals[name]))
        # A seed that has not come to its end yet has none.
        told = f"{means[0]:.2%}"
        if len(means) > 1:
            told = _mean_and_error(means)
        table.add_row(plain_text(name), told)
    return table


def _measured(records: Sequence[RunRecord]) -> Table:
    """Return what the method has measured of clients at the end, as means of seeds."""
    table = bare_table("at the end, over clients", "mean of all seeds")
    for name in records[0].figures:
        # A seed that has not come to its end yet has none.
        having = [record for record in records if name in record.figures]
        means = [mean_accuracy(record.figures[name]) for record in having]
        table.add_row(plain_text(name), f"{mean(means):.3f}")
    return table


def _mean_and_error(values: Sequence[float], metric: str = "accuracy") -> str:
    # A seed's loss may be infinite, and so is the mean then.
    if not all(map(isfinite, values)):
        return text_of(metric, mean(values))
    error = stdev(values) / sqrt(len(values))
    if not METRICS[metric].in_percent:
        return f"{mean(values):.4g} ± {error:.2g}"
    return f"{mean(values):.2%} ± {100 * error:.2f}"
