"""A run in words and tables."""

from math import isnan

from rich.console import Console
from rich.table import Table

from hpcfed.record.reading import RunRecord


def show(record: RunRecord, console: Console) -> None:
    facts = record.facts
    console.print(
        f"[bold]{facts['method']}[/] on {facts['dataset']} ({record.config['partition']}), "
        f"{facts['clients']} clients on {facts['ranks']} ranks, {facts['model']} with {facts['columns']:,} columns, "
        f"seed {facts['seed']}",
        highlight=False,
    )
    done = f"{record.rounds_done} of {record.config['rounds']} rounds"
    console.print(f"status: {record.status}, {done}" + (f": {record.error}" if record.error else ""), highlight=False)
    if record.rounds_done:
        console.print(_accuracy(record), _phases(record), _costs(record))
    console.print(f"results: {record.folder / 'run.h5'}", highlight=False, soft_wrap=True)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def _accuracy(record: RunRecord) -> Table:
    table = _table("\naccuracy", "\nlast", "\nbest")
    rows = {"clients, own test data": "accuracy", "global model, all test data": "global_accuracy"}
    for label, name in rows.items():
        last = record.last(name)
        if not isnan(last):
            best = max(value for value in record.rounds[name] if not isnan(value))
            table.add_row(label, f"{last:.2%}", f"{best:.2%}")
    return table


def _phases(record: RunRecord) -> Table:
    table = _table("\nphase", "\nms per round", "\nshare")
    phases = record.phase_seconds()
    total = sum(phases.values())
    for name, seconds in sorted(phases.items(), key=lambda item: -item[1]):
        if seconds > 0:
            table.add_row(name, f"{1e3 * seconds:.2f}", f"{seconds / total:.1%}" if total else "")
    table.add_row("round", f"{1e3 * total:.2f}", "")
    return table


def _costs(record: RunRecord) -> Table:
    table = _table("\ncost", "")
    table.add_row("sent by clients", _bytes(record.rounds["bytes_up"].sum()))
    table.add_row("sent to clients", _bytes(record.rounds["bytes_down"].sum()))
    table.add_row("peak memory of a rank", _bytes(record.peak_memory.max()))
    table.add_row("wall time of all rounds", f"{record.rounds['seconds'].sum():.2f} s")
    return table


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"
