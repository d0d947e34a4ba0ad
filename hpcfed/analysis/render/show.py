"""`hpcfed show` for a run, or for seeds that advanced together: lines that say what was
run and how far it has come, then the tables of its findings.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console

from hpcfed.analysis.render.console import print_tables, say
from hpcfed.analysis.run_findings import as_json, read_files, run_findings
from hpcfed.errors import count, printable
from hpcfed.results.as_json import run_summary
from hpcfed.results.folder import made
from hpcfed.results.run import RunRecord
from hpcfed.results.stacks import advanced_together, stack_text
from hpcfed.results.stored import longest


def title(record: RunRecord) -> str:
    """Return what was run on what."""
    facts = record.facts
    ranks = count(facts["ranks"], "rank")
    server_ranks = record.config.get("server_ranks")
    if server_ranks:
        ranks += f" and {count(server_ranks, 'server rank')}"
    return (
        f"{facts['method']} on {facts['dataset']} ({record.config['partition']}): "
        f"{count(facts['clients'], 'client')} on {ranks}, "
        f"{facts['model']} with {facts['columns']:,} columns"
    )


def status(record: RunRecord) -> str:
    """Return how many rounds a run has done, and why it did not do more."""
    planned = record.config["rounds"]
    line = f"status: {record.status}, "
    line += f"{record.rounds_done} of {count(planned, 'round')}"
    if record.status == "complete" and record.rounds_done < planned:
        # Records of older versions do not say why.
        why = "stopped early" if _lost_patience(record) else "stopped at the target"
        line += f", {printable(str(record.facts.get('ended', why)))}"
    line += of_new_clients(record)
    return f"{line}: {record.error}" if record.error else line


def of_new_clients(record: RunRecord) -> str:
    """Return how many rounds of new clients are done, if some are still missing."""
    new = record.new_rounds
    if new is None or new.rounds_done == len(new.bytes_up):
        return ""
    later = count(len(new.bytes_up), "round")
    return f", then {new.rounds_done} of {later} of new clients"


def statuses(records: Sequence[RunRecord]) -> list[str]:
    """Return the status that all seeds have, as usual; else that of each by its seed."""
    lines = [status(record) for record in records]
    if len(set(lines)) == 1:
        return lines[:1]
    seeds = [record.facts["seed"] for record in records]
    return [f"seed {seed}: {line}" for seed, line in zip(seeds, lines, strict=True)]


def _lost_patience(record: RunRecord) -> bool:
    """Tell whether a run ended early because it no longer improved. Only that and
    reaching the target complete a run early.
    """
    return record.config.get("early_stop") is not None and not record.ended_at_target


def show(record: RunRecord, console: Console) -> None:
    """Print a run: what it was, what it reached, what it cost, and where its files
    are.
    """
    say(console, f"{title(record)}, seed {record.facts['seed']}", status(record))
    beside = stack_text(record.stacks)
    if beside:
        say(
            console,
            f"one of {beside}: seconds, memory and energy are those of all of them",
        )
    say(console, *_remarks(record))
    _print_findings([record], console)
    console.print()
    for path, checksum in (record.environment.get("files") or {}).items():
        say(console, f"made by {path}, sha256 {checksum[:12]}…")
    say(console, f"files in {record.folder}: {', '.join(made(record.folder))}")


def _remarks(record: RunRecord) -> Iterator[str]:
    """Yield what a reader of the tables should know first."""
    if len(record.evaluated) < record.facts["clients"]:
        sample = count(len(record.evaluated), "client")
        yield f"clients are judged by a sample of {sample}"
    for name in ("uploads", "privacy"):
        if record.facts.get(name):
            yield f"{name}: {record.facts[name]}"


def show_seeds(records: Sequence[RunRecord], folder: Path, console: Console) -> None:
    """Print several seeds of a run in `folder`."""
    together = advanced_together([record.stacks for record in records])
    seeds = count(len(records), "seed") + (" at once" if together else "")
    say(console, f"{title(records[0])}, {seeds}")
    say(console, *statuses(records))
    say(console, *_remarks(records[0]))
    _print_findings(records, console)
    say(console, "")
    if len(records) > 1:
        say(console, of_first(records))
    timed = longest(records)
    seconds = float(timed.rounds["seconds"].sum())
    whose = "all seeds" if together else f"seed {timed.facts['seed']}"
    say(console, f"wall time of all rounds of {whose}: {seconds:.2f} s")
    names = ", ".join(record.folder.name for record in records)
    say(console, f"runs in {folder}: {names}")


def of_first(records: Sequence[RunRecord]) -> str:
    """Say which tables describe a single seed, and where fewer than all advanced."""
    timed = longest(records)
    whose = "all seeds at once"
    together = advanced_together([record.stacks for record in records])
    if not together:
        whose = f"seed {timed.facts['seed']}: {stack_text(timed.stacks)}"
    line = (
        f"Time, memory and energy are those of {whose}. Classes, traffic and "
        f"other costs are those of seed {records[0].facts['seed']}."
    )
    done = sorted(record.rounds_done for record in records)
    if together and done[0] < done[-1]:
        line += f" From round {done[0] + 1} to {done[-1]} fewer seeds advanced."
    return line


def _print_findings(records: Sequence[RunRecord], console: Console) -> None:
    files = read_files(records)
    found = run_findings(records, files)
    if found:
        console.print()
        print_tables(console, chain.from_iterable(found.values()))
    if files.problem:
        say(console, "", f"left out: {files.problem}")


def shown_json(records: Sequence[RunRecord], *, seeds: bool) -> dict[str, Any]:
    """Return a run or its seeds as JSON values: everything recorded, and the tables."""
    summaries = [run_summary(record) for record in records]
    content = {"seeds": summaries} if seeds else summaries[0]
    found = run_findings(records, read_files(records))
    return {**content, "tables": as_json(found)}
