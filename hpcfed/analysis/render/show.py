"""`hpcfed show`: a run in words and tables."""

from math import isnan

import numpy as np
from rich.console import Console
from rich.table import Table

from hpcfed.analysis.labels import ACCURACIES, ALL_ACCURACIES, both_series
from hpcfed.analysis.render.console import bare_table, plain_text, say
from hpcfed.errors import count, printable
from hpcfed.options.metrics import METRICS, label_of, text_of
from hpcfed.results.folder import made
from hpcfed.results.pace import MS_PER_ROUND, per_round
from hpcfed.results.run import (
    LAST_UPDATES,
    LearningRecord,
    NewRounds,
    Reached,
    RunRecord,
    mean_accuracy,
)
from hpcfed.results.series import ROUND_SERIES, RoundSeries
from hpcfed.words import bytes_text, flops_text, time_text

WORK = (
    "trained_samples",
    "trained_steps",
    "train_flops",
    "finetuned_samples",
    "finetune_flops",
)
"""Series of what clients have trained."""
MOST_CLASSES = 20
"""Classes in a table; of more, those that are found least."""


def show(record: RunRecord, console: Console) -> None:
    """Print a run: what it was, accuracy, where its time went, what it cost, and where
    its files are.
    """
    say(
        console,
        f"{title(record)}, seed {record.facts['seed']}",
        status(record),
    )
    if record.stacked_seeds > 1:
        say(
            console,
            f"one of {record.stacked_seeds} runs at once: seconds, memory and energy "
            "are those of all of them",
        )
    if len(record.evaluated) < record.facts["clients"]:
        sample = count(len(record.evaluated), "client")
        say(console, f"clients are judged by a sample of {sample}")
    uploads = record.facts.get("uploads")
    if uploads:
        say(console, f"uploads: {uploads}")
    privacy = record.facts.get("privacy")
    if privacy:
        say(console, f"privacy: {privacy}")
    for table in _tables(record) if record.rounds_done else ():
        console.print()
        console.print(table)
    console.print()
    for path, checksum in (record.environment.get("files") or {}).items():
        say(console, f"made by {path}, sha256 {checksum[:12]}…")
    say(console, f"files in {record.folder}: {', '.join(made(record.folder))}")


def _tables(record: RunRecord) -> list[Table]:
    # From what most people want to know to what few do.
    tables = []
    # Where the task has no accuracy, other metrics stand in its place.
    if record.task in METRICS["accuracy"].tasks:
        tables.append(_accuracy(record))
    if record.metrics:
        tables.append(_metrics(record))
    if record.class_accuracy:
        tables.append(_classes(record))
    if record.figures:
        tables.append(_figures(record))
    if record.target is not None:
        tables.append(_target(record))
    if record.newcomers:
        tables.append(_newcomers(record))
    if record.new_rounds is not None:
        tables.append(_new_rounds(record.new_rounds))
    tables.append(_phases(record))
    if record.learnings:
        tables.append(_server(record))
    tables.append(_costs(record))
    return tables


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
    """Return how far a run has come, and why no further."""
    planned = record.config["rounds"]
    line = f"status: {record.status}, "
    line += f"{record.rounds_done} of {count(planned, 'round')}"
    if record.status == "complete" and record.rounds_done < planned:
        line += f", {_why_early(record)}"
    return f"{line}: {record.error}" if record.error else line


def _why_early(record: RunRecord) -> str:
    """Return why a complete run has fewer rounds than were planned."""
    if "ended" in record.facts:
        return printable(str(record.facts["ended"]))
    # Nothing else than target and patience completes a run early.
    return "stopped early" if _lost_patience(record) else "stopped at the target"


def _lost_patience(record: RunRecord) -> bool:
    """Tell whether a run that was complete early ended because nothing got better."""
    if record.config.get("early_stop") is None:
        return False
    reached = record.reached() if record.config.get("stop_at_target") else None
    return reached is None or reached.rounds != record.rounds_done


def _accuracy(record: RunRecord) -> Table:
    table = bare_table("accuracy", "last", "best")
    for name, whose in ALL_ACCURACIES.items():
        last = record.last(name)
        if not isnan(last):
            table.add_row(
                whose,
                f"{last:.2%}",
                f"{record.best(name):.2%}",
            )
    for name, accuracies in record.finals.items():
        mean = f"{mean_accuracy(accuracies):.2%}"
        table.add_row(plain_text(f"at the end: {name}"), mean, "")
    return table


def _metrics(record: RunRecord) -> Table:
    table = bare_table("metric", "last", "best")
    for name in record.metrics:
        label = label_of(name, record.task)
        for series, whose in both_series(name).items():
            last = record.last(series)
            if not isnan(last):
                best = text_of(name, record.best(series))
                table.add_row(f"{label}: {whose}", text_of(name, last), best)
    return table


def _classes(record: RunRecord) -> Table:
    """Return the last accuracy of every class, or of those that are found least."""
    last = record.last_class_accuracy()
    columns = [whose for name, whose in ACCURACIES.items() if name in last]
    values = [last[name] for name in ACCURACIES if name in last]
    if not values:
        return bare_table("accuracy of class")
    # By the global model, if there is one; NaN comes last.
    hardest = np.argsort(values[-1])[:MOST_CLASSES]
    table = bare_table("accuracy of class", *columns)
    for number in np.sort(hardest):
        cells = [f"{of_classes[number]:.2%}" for of_classes in values]
        table.add_row(str(number), *cells)
    if len(values[-1]) > MOST_CLASSES:
        table.add_row(f"those found least, of {len(values[-1])}", *("" for _ in values))
    return table


def _figures(record: RunRecord) -> Table:
    """Return what the method has measured of clients at the end."""
    table = bare_table("at the end, over clients", "mean", "least", "most")
    for name, values in record.figures.items():
        known = values[~np.isnan(values)]
        cells = [f"{of(known):.3f}" for of in (np.mean, np.min, np.max)]
        table.add_row(plain_text(name), *cells)
    return table


def _target(record: RunRecord) -> Table:
    table = target_table(record)
    reached = record.reached()
    if reached is None:
        table.add_row("not reached")
    else:
        table.add_row("reached after", *target_cells(reached))
    return table


def target_table(record: RunRecord) -> Table:
    """Return the head of a table of what it took to reach the target."""
    columns = ["rounds", "seconds", "sent"]
    if record.has_clock:
        columns.append("virtual time")
    return bare_table(f"target of {record.target:g} %", *columns)


def target_cells(reached: Reached) -> list[str]:
    """Return the cells of `target_table` for what it took."""
    cells = [
        str(reached.rounds),
        f"{reached.seconds:.2f}",
        bytes_text(reached.bytes),
    ]
    if not isnan(reached.virtual_seconds):
        cells.append(time_text(reached.virtual_seconds))
    return cells


def _newcomers(record: RunRecord) -> Table:
    """Return a row for every local update: there may be more of them than columns fit
    in a line.
    """
    starts = [plain_text(start) for start in record.newcomers]
    table = bare_table("new clients that start from", *starts)
    updates = zip(*record.newcomers.values(), strict=True)
    for update, by_start in enumerate(updates):
        means = [f"{mean_accuracy(accuracies):.2%}" for accuracies in by_start]
        table.add_row(f"after {count(update, 'local update')}", *means)
    if update > LAST_UPDATES:
        last = []
        for start in record.newcomers:
            last.append(f"{record.newcomers_last(start):.2%}")
        table.add_row(f"mean of the last {LAST_UPDATES}", *last)
    return table


def _new_rounds(rounds: NewRounds) -> Table:
    """Return a row for every round of new clients that was evaluated."""
    table = bare_table("new clients", "as they stand", "after training")
    columns = [rounds.curve(name) for name in ("accuracy", "trained_accuracy")]
    for number, means in enumerate(zip(*columns, strict=True), 1):
        if not all(map(isnan, means)):
            table.add_row(f"after round {number}", *(f"{mean:.2%}" for mean in means))
    last = [f"{rounds.last(name):.2%}" for name in ("accuracy", "trained_accuracy")]
    table.add_row(f"mean of the last {LAST_UPDATES}", *last)
    return table


def _phases(record: RunRecord) -> Table:
    """Return where the time goes, of a usual round and of all, the longest phase first."""
    table = bare_table("phase", MS_PER_ROUND, "s in all rounds", "share")
    usual, totals = record.phase_seconds(), record.phase_totals()
    whole = sum(totals.values())
    for name, seconds in sorted(totals.items(), key=lambda item: -item[1]):
        if seconds > 0:
            cells = [f"{1e3 * usual[name]:.2f}", f"{seconds:.3f}"]
            table.add_row(name, *cells, f"{seconds / whole:.1%}")
    # The definition of "per round" leaves out the first, which warms up.
    name = "round, after the first" if record.rounds_done > 1 else "round"
    usual_round = float(per_round(record.counted_seconds()))
    table.add_row(name, f"{1e3 * usual_round:.2f}", f"{record.timed_seconds():.3f}", "")
    return table


def _server(record: RunRecord) -> Table:
    """Return what the server's model took, over all times that it was trained, beside
    the whole time of the run.
    """
    table = bare_table(
        "server", "seconds", "share", "parameters", "samples/s", "of peak"
    )
    by_phase = dict.fromkeys(record.learnings[0].seconds, 0.0)
    for learning in record.learnings:
        for phase in by_phase:
            by_phase[phase] += learning.seconds[phase]
    # Stacked seeds share the rounds' time, but each had the server for itself.
    rounds = float(record.rounds["seconds"].sum())
    whole = rounds / record.stacked_seeds
    last = record.learnings[-1]
    for phase, seconds in by_phase.items():
        share = seconds / whole
        cells = [f"{seconds:.2f}", f"{share:.1%}"]
        if phase in last.parameters:  # others train no network
            cells += _network(last, phase)
        table.add_row(plain_text(phase), *cells)
    server = float(sum(by_phase.values()))
    rest = whole - server
    table.add_row(
        "server in all",
        f"{server:.2f}",
        f"{server / whole:.1%}",
    )
    table.add_row(
        "clients and the rest",
        f"{rest:.2f}",
        f"{rest / whole:.1%}",
    )
    return table


def _network(last: LearningRecord, name: str) -> list[str]:
    """Return cells about one of the server's networks, as it was trained last."""
    parameters = last.parameters[name]
    rate = last.samples_per_second[name]
    cells = [f"{parameters:,}", f"{rate:,.0f}"]
    of_peak = last.utilisation[name]
    if not isnan(of_peak):  # known for GPUs alone
        cells.append(f"{of_peak:.1%}")
    return cells


def _costs(record: RunRecord) -> Table:
    table = bare_table("cost", "")
    # Bytes first, and memory beside them.
    totals = [series for series in ROUND_SERIES.values() if series.total]
    for series in totals:
        if series.unit == "bytes":
            _add_total(table, record, series)
    if record.new_rounds is not None:
        sent = bytes_text(float(np.nansum(record.new_rounds.bytes_up)))
        table.add_row("sent by new clients in their rounds", sent)
    if not isnan(record.newcomer_bytes):
        sent = bytes_text(record.newcomer_bytes)
        table.add_row("sent to a new client to begin with", sent)
    peak = bytes_text(record.peak_memory.max())
    table.add_row("peak memory of a rank", peak)
    for series in totals:
        if series.unit != "bytes":
            _add_total(table, record, series)
    _add_way(table, record)
    if record.learnings:
        _add_server(table, record.learnings[-1])
    reached = record.rounds_to(0.95)
    if reached is not None:
        table.add_row("rounds to 95 % of the clients' own peak", str(reached))
    # GenFed's supplement: the server's validation data leaks to the clients.
    if record.config.get("supplement"):
        leaked = record.facts["leaked_samples"]
        whole = record.facts["validation_samples"]
        name = "validation samples that clients were given"
        table.add_row(name, f"{leaked} of {whole}")
    _add_balance(table, record)
    if record.energy is not None and not isnan(record.energy):
        # The server's ranks do not count their GPUs' energy.
        workers = record.config.get("server_ranks")
        whose = "of the workers' GPUs" if workers else "of all GPUs"
        table.add_row(f"energy {whose}", f"{record.energy:,.0f} J")
    if record.cpu_energy is not None and not isnan(record.cpu_energy):
        # The counters are the machine's: whatever else runs there is in them.
        name = "energy of the hosts' CPUs and memory"
        table.add_row(name, f"{record.cpu_energy:,.0f} J")
    return table


def _add_total(table: Table, record: RunRecord, series: RoundSeries) -> None:
    """Tell the sum of a series over all rounds; nothing where nobody was counted."""
    values = record.rounds[series.name]
    total = float(np.nansum(values))
    # Told as a share of the selected uploads, also where it is none.
    if series.name == "kept_attackers":
        selected = int(np.nansum(record.rounds["kept"]))
        if selected and record.config.get("attack", "none") != "none":
            share = f"{total / selected:.0%}"
            table.add_row(series.total, f"{int(total)} ({share})")
    elif series.name == "arrived":
        arrived = record.arrived_share()
        if not isnan(arrived):
            table.add_row(series.total, f"{int(total)} ({arrived:.1%})")
    elif series.unit == "bytes":
        table.add_row(series.total, bytes_text(total))
    elif series.unit == "clients":
        if int(total):
            table.add_row(series.total, str(int(total)))
    elif series.name in WORK:
        _add_work(table, series, values)
    else:
        table.add_row(series.total, f"{total:.2f} {series.unit}")


def _add_work(table: Table, series: RoundSeries, values: np.ndarray) -> None:
    """Tell what clients have trained; of rounds that an older version has recorded
    nobody knows.
    """
    total = float(values.sum())
    if isnan(total):
        # One line will do.
        if series.name == WORK[0]:
            table.add_row(series.total, "unknown: an older version did not count them")
    elif total:
        counted = f"{total:,.0f}"
        if series.name.endswith("flops"):
            counted = flops_text(total)
        table.add_row(series.total, counted)


def _add_way(table: Table, record: RunRecord) -> None:
    """Tell virtual time, staleness and privacy, of runs that have them."""
    virtual = record.last("virtual_seconds")
    if not isnan(virtual):
        table.add_row("virtual time of all rounds", time_text(virtual))
    staleness = record.mean("staleness")
    if not isnan(staleness):
        table.add_row("versions that an upload was behind", f"{staleness:.2f}")
    clip_norm = record.last("clip_norm")
    if not isnan(clip_norm):
        table.add_row("norm that updates were clipped to", f"{clip_norm:.4g}")
    spent = privacy_text(record)
    if spent:
        table.add_row("privacy spent", spent)


def privacy_text(record: RunRecord) -> str:
    """Return `ε 2.03 at δ 1e-06`; nothing of a run without privacy."""
    epsilon = record.last("epsilon")
    if isnan(epsilon):
        return ""
    text = f"ε {epsilon:.3g}"
    delta = record.facts.get("delta")
    return text if delta is None else f"{text} at δ {delta:.2g}"


def _add_server(table: Table, last: LearningRecord) -> None:
    table.add_row("uploads that the server learnt from", str(last.rows))
    peak = bytes_text(float(last.peak_memory.max()))
    table.add_row("peak memory of a server rank", peak)
    name = "generated rows nearest to their own client's updates"
    table.add_row(name, f"{last.kept:.0%}")


def _add_balance(table: Table, record: RunRecord) -> None:
    """Tell how evenly clients were spread over ranks, and when they were relocated."""
    imbalance = record.imbalance()
    if record.facts["ranks"] > 1 and not isnan(imbalance):
        table.add_row("slowest rank's training by the mean", f"{imbalance:.2f}")
    # Rebalancing happens between rounds.
    if record.moves:
        rounds = ", ".join(str(round) for round in record.moves)
        table.add_row("clients changed ranks after round", rounds)
