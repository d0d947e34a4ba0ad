"""A run in words and tables."""

from collections.abc import Sequence
from math import isnan, sqrt
from pathlib import Path
from statistics import mean, stdev

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpcfed.errors import count, printable
from hpcfed.record.run import LAST_UPDATES, RunRecord, mean_accuracy

WIDEST = 200
"""Columns that a table may take, whatever the terminal has."""
ACCURACIES = {
    "clients, own test data": "accuracy",
    "global model, all test data": "global_accuracy",
}


class Output(Console):
    """Tables as wide as they are: a number that a narrow terminal cuts is wrong. And `|
    head` is no error.
    """

    def __init__(self, *, force_terminal: bool | None = None) -> None:
        super().__init__(force_terminal=force_terminal)
        self.width = max(self.width, WIDEST)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def show(record: RunRecord, console: Console) -> None:
    """Prints the run: what it was, accuracy, where its time went, what it cost, and
    where its files are.
    """
    lines = [f"{_title(record)}, seed {record.facts['seed']}", _status(record)]
    if record.stacked_seeds > 1:
        lines.append(
            f"one of {record.stacked_seeds} seeds at once: seconds, memory and energy "
            "are those of all of them"
        )
    say(console, *lines)
    if record.rounds_done:
        tables = [_accuracy(record)]
        if record.target is not None:
            tables.append(_target(record))
        if record.newcomers:
            tables.append(_newcomers(record))
        tables.append(_phases(record))
        if record.learnings:
            tables.append(_server(record))
        for table in (*tables, _costs(record)):
            console.print()
            console.print(table)
    console.print()
    names = sorted(path.name for path in record.folder.glob("*.h5"))
    say(console, f"files in {record.folder}: {', '.join(names)}")


def show_seeds(records: Sequence[RunRecord], folder: Path, console: Console) -> None:
    """Prints several seeds of a run: the accuracy of each, and their mean with its
    standard error.
    """
    say(console, f"{_title(records[0])}, {count(len(records), 'seed')} at once")
    statuses = {_status(record): None for record in records}
    say(console, *statuses, "")
    columns = {
        label: [record.last(name) for record in records]
        for label, name in ACCURACIES.items()
    }
    _print_seeds("last accuracy", records, columns, console)
    if records[0].target is not None:
        best = {
            label: [record.best(name) for record in records]
            for label, name in ACCURACIES.items()
        }
        console.print()
        _print_seeds("best accuracy", records, best, console)
        console.print()
        console.print(_seeds_target(records))
    if records[0].finals:
        table = bare_table(
            "at the end, clients' own test data",
            "mean" if len(records) == 1 else "mean ± standard error",
        )
        for name in records[0].finals:
            values = [
                mean_accuracy(record.finals[name])
                for record in records
                if name in record.finals
            ]
            table.add_row(
                plain_text(name),
                _mean_and_error(values) if len(values) > 1 else f"{values[0]:.2%}",
            )
        console.print()
        console.print(table)
    seconds = max(float(record.rounds["seconds"].sum()) for record in records)
    say(console, "", f"wall time of all rounds of all seeds: {seconds:.2f} s")
    say(
        console,
        f"runs in {folder}: {', '.join(record.folder.name for record in records)}",
    )


def _print_seeds(
    title: str,
    records: Sequence[RunRecord],
    columns: dict[str, list[float]],
    console: Console,
) -> None:
    columns = {
        label: values
        for label, values in columns.items()
        if not all(isnan(value) for value in values)
    }
    table = bare_table(title, *columns)
    for number, record in enumerate(records):
        table.add_row(
            f"seed {record.facts['seed']}",
            *(f"{values[number]:.2%}" for values in columns.values()),
        )
    if len(records) > 1:
        table.add_row(
            "mean ± standard error",
            *(_mean_and_error(values) for values in columns.values()),
        )
    console.print(table)


def _seeds_target(records: Sequence[RunRecord]) -> Table:
    """What every seed took; the mean only where all have reached it."""
    table = bare_table(
        f"target of {records[0].target:g} %", "rounds", "seconds", "sent"
    )
    all_reached = [
        reached for record in records if (reached := record.reached()) is not None
    ]
    for record in records:
        reached, name = record.reached(), f"seed {record.facts['seed']}"
        if reached is None:
            table.add_row(f"{name}: not reached", "", "", "")
        else:
            table.add_row(
                name,
                str(reached.rounds),
                f"{reached.seconds:.2f}",
                bytes_text(reached.bytes),
            )
    if 1 < len(all_reached) == len(records):
        rounds = [reached.rounds for reached in all_reached]
        error = stdev(rounds) / sqrt(len(rounds))
        seconds, sent = (
            mean(getattr(of, name) for of in all_reached)
            for name in ("seconds", "bytes")
        )
        table.add_row(
            "mean ± standard error",
            f"{mean(rounds):.1f} ± {error:.1f}",
            f"{seconds:.2f}",
            bytes_text(sent),
        )
    return table


def _mean_and_error(values: Sequence[float]) -> str:
    error = stdev(values) / sqrt(len(values))
    return f"{mean(values):.2%} ± {100 * error:.2f}"


def _title(record: RunRecord) -> str:
    facts = record.facts
    return (
        f"{facts['method']} on {facts['dataset']} ({record.config['partition']}): "
        f"{count(facts['clients'], 'client')} on {count(facts['ranks'], 'rank')}, "
        f"{facts['model']} with {facts['columns']:,} columns"
    )


def _status(record: RunRecord) -> str:
    done = f"status: {record.status}, {record.rounds_done} of {count(record.config['rounds'], 'round')}"
    if record.status == "complete" and record.rounds_done < record.config["rounds"]:
        done += ", stopped at the target"
    return done + (f": {record.error}" if record.error else "")


def say(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(printable(line), highlight=False, markup=False, soft_wrap=True)


def plain_text(name: str) -> Text:
    """A name out of a file, of which a table must not take brackets for styles."""
    return Text(printable(name))


def bare_table(*columns: str | Text) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def _accuracy(record: RunRecord) -> Table:
    table = bare_table("accuracy", "last", "best")
    for label, name in ACCURACIES.items():
        last = record.last(name)
        if not isnan(last):
            table.add_row(label, f"{last:.2%}", f"{record.best(name):.2%}")
    for name, accuracy in record.finals.items():
        table.add_row(
            plain_text(f"at the end: {name}"), f"{mean_accuracy(accuracy):.2%}", ""
        )
    return table


def _target(record: RunRecord) -> Table:
    reached = record.reached()
    table = bare_table(f"target of {record.target:g} %", "rounds", "seconds", "sent")
    if reached is None:
        table.add_row("not reached", "", "", "")
    else:
        table.add_row(
            "reached after",
            str(reached.rounds),
            f"{reached.seconds:.2f}",
            bytes_text(reached.bytes),
        )
    return table


def _newcomers(record: RunRecord) -> Table:
    """A row for every local update: there may be more of them than columns fit in a
    line.
    """
    table = bare_table(
        "new clients that start from", *map(plain_text, record.newcomers)
    )
    for update, accuracies in enumerate(zip(*record.newcomers.values(), strict=True)):
        table.add_row(
            f"after {count(update, 'local update')}",
            *(f"{mean_accuracy(own):.2%}" for own in accuracies),
        )
    if update > LAST_UPDATES:
        last = (record.newcomers_last(start) for start in record.newcomers)
        table.add_row(
            f"mean of the last {LAST_UPDATES}",
            *(f"{accuracy:.2%}" for accuracy in last),
        )
    return table


def _server(record: RunRecord) -> Table:
    """What the server's model took, over all times that it learnt, and beside it the
    clients' whole time.
    """
    seconds = {
        phase: sum(learning.seconds[phase] for learning in record.learnings)
        for phase in record.learnings[0].seconds
    }
    last, total = record.learnings[-1], float(sum(seconds.values()))
    everything = (
        float(record.rounds["seconds"].sum()) / record.stacked_seeds
    )  # each had the server for itself
    table = bare_table(
        "server", "seconds", "share", "parameters", "samples/s", "of peak"
    )
    for phase, own in seconds.items():
        about = []
        if phase in last.parameters:
            used = last.utilisation[phase]
            about = [
                f"{last.parameters[phase]:,}",
                f"{last.samples_per_second[phase]:,.0f}",
            ]
            about += [] if isnan(used) else [f"{used:.1%}"]
        table.add_row(
            plain_text(phase), f"{own:.2f}", f"{own / everything:.1%}", *about
        )
    for name, part in {
        "server in all": total,
        "clients and the rest": everything - total,
    }.items():
        table.add_row(name, f"{part:.2f}", f"{part / everything:.1%}")
    return table


def _phases(record: RunRecord) -> Table:
    table = bare_table("phase", "ms per round", "share")
    phases = record.phase_seconds()
    total = sum(phases.values())
    for name, seconds in sorted(phases.items(), key=lambda item: -item[1]):
        if seconds > 0:
            table.add_row(
                name, f"{1e3 * seconds:.2f}", f"{seconds / total:.1%}" if total else ""
            )
    table.add_row(
        "round, after the first" if record.rounds_done > 1 else "round",
        f"{1e3 * total:.2f}",
        "",
    )
    return table


def _costs(record: RunRecord) -> Table:
    table = bare_table("cost", "")
    table.add_row("sent by clients", bytes_text(record.rounds["bytes_up"].sum()))
    table.add_row("sent to clients", bytes_text(record.rounds["bytes_down"].sum()))
    if not isnan(record.newcomer_bytes):
        table.add_row(
            "sent to a new client to begin with", bytes_text(record.newcomer_bytes)
        )
    table.add_row("peak memory of a rank", bytes_text(record.peak_memory.max()))
    if kept := int(np.nansum(record.rounds["kept"])):
        malicious = int(np.nansum(record.rounds["kept_attackers"]))
        table.add_row("uploads that the server selected", str(kept))
        if record.config.get("attack", "none") != "none":
            table.add_row(
                "attackers' among them", f"{malicious} ({malicious / kept:.0%})"
            )
    if bad := int(np.nansum(record.rounds["excluded"])):
        table.add_row("updates left out, because they were not finite", str(bad))
    table.add_row("wall time of all rounds", f"{record.rounds['seconds'].sum():.2f} s")
    if record.learnings:
        last = record.learnings[-1]
        table.add_row("uploads that the server learnt from", str(last.rows))
        table.add_row(
            "peak memory of a server rank", bytes_text(float(last.peak_memory.max()))
        )
        table.add_row(
            "generated rows nearest to their own client's latents", f"{last.kept:.0%}"
        )
    reached = record.rounds_to(0.95)
    if reached is not None:
        table.add_row("rounds to 95 % of the clients' own peak", str(reached))
    if record.config.get("supplement"):
        leaked, whole = (
            record.facts["leaked_samples"],
            record.facts["validation_samples"],
        )
        table.add_row(
            "validation samples that clients were given", f"{leaked} of {whole}"
        )
    if record.facts["ranks"] > 1 and not isnan(record.imbalance()):
        table.add_row(
            "slowest rank's training by the mean", f"{record.imbalance():.2f}"
        )
    if record.moves:
        table.add_row(
            "clients changed ranks after round",
            ", ".join(str(round) for round in record.moves),
        )
    if record.energy is not None and not isnan(record.energy):
        whose = (
            "of the workers' GPUs"
            if record.config.get("server_ranks")
            else "of all GPUs"
        )
        table.add_row(f"energy {whose}", f"{record.energy:,.0f} J")
    return table


def bytes_text(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"
