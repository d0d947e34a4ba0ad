"""Costs of a run: time by phase, the server, bytes, memory, energy, virtual time and
privacy.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import isnan

import numpy as np

from hpcfed.analysis.findings import (
    BYTES,
    COUNT,
    FLOP,
    HUNDREDTHS,
    JOULES,
    MILLISECONDS,
    PLAIN,
    SECONDS,
    SHARE,
    TIME,
    WALL_TIME,
    Cell,
    Kind,
    Row,
    Table,
)
from hpcfed.errors import count
from hpcfed.results.learnings import LearningRecord
from hpcfed.results.pace import MS_PER_ROUND, PER_ROUND_MEANS, per_round
from hpcfed.results.run import RunRecord
from hpcfed.results.series import ROUND_SERIES, RoundSeries
from hpcfed.results.server import PROMISED
from hpcfed.results.stored import most_memory, timed_run, wall_time
from hpcfed.runtime.timer import PHASES
from hpcfed.words import formatted

Times = Mapping[str, np.ndarray]
"""Times of all members of all rounds, by column of the clock table; may be empty."""
WORK = (
    "trained_samples", "trained_steps", "trained_positions", "learnt_tokens",
    "train_flops", "finetuned_samples", "finetune_flops",
)  # fmt: skip
"""Series of what clients have trained."""
PARTS = {"downloads": "download", "local steps": "train", "uploads": "upload"}
"""The parts of a member's virtual time, and their columns."""
SHARES = {"tenth": 0.1, "median": 0.5, "nine tenths": 0.9, "most": 1.0}
"""Columns of a distribution, and the share of members that are faster."""
TOTAL_SECONDS = Kind("s", formatted(".3f"))
WHOLE_PERCENT = Kind("fraction", formatted(".0%"))


def of_phases(record: RunRecord) -> Table:
    """Return where the time goes, in a typical round and in total, longest first.

    Rounds before a resume on other ranks, or beside other runs, are left out.
    """
    first, last = record.untimed + 1, record.rounds_done
    usual, totals = record.phase_seconds(), record.phase_totals()
    whole = sum(totals.values())
    by_rank = per_round(record.counted_phases())
    several = len(by_rank) > 1
    rows: list[Row] = []
    for name, seconds in sorted(totals.items(), key=lambda item: -item[1]):
        if seconds > 0:
            of_ranks = by_rank[:, PHASES.index(name)]
            ends = [of_ranks.min(), of_ranks.max()] if several else []
            cells = [MILLISECONDS(usual[name]), TOTAL_SECONDS(seconds)]
            cells.append(SHARE(seconds / whole))
            rows.append([name, *cells, *(MILLISECONDS(float(end)) for end in ends)])
    # "Per round" leaves out the first round, which warms up.
    in_all, name = "s in all rounds", "round"
    where, others = "on these ranks", "on another number of ranks"
    if record.first_alike == record.untimed:
        where, others = "of so many runs", "with another number of runs at once"
    if last > first:
        name = "round, after the first"
    caption = PER_ROUND_MEANS
    if several:
        caption += "; of a rank: medians of its own, which may lie on one side of that"
    if first > 1:
        in_all = f"s in rounds {first} to {last}"
        name = f"round, after round {first}"
        if last == first:
            in_all, name = f"s in round {first}", f"round {first}, first {where}"
        caption += f"; the rounds before ran {others}"
    if record.stacked_seeds > 1:
        caption += "; other: with the wait for the runs beside it"
    usual_round = float(per_round(record.counted_seconds()))
    whole_run = TOTAL_SECONDS(record.timed_seconds())
    columns = ["phase", MS_PER_ROUND, in_all, "share"]
    if several:
        columns += ["ms, least of a rank", "ms, most of a rank"]
    empty = ["" for _ in columns[3:]]
    rows.append([name, MILLISECONDS(usual_round), whole_run, *empty])
    return Table(columns, rows, caption)


def of_server(runs: Sequence[RunRecord]) -> Iterator[Table]:
    """Yield what training the server's model took for all seeds, and its share of their
    time; its networks are those of the first.
    """
    learnings = [one for run in runs for one in run.learnings]
    if not runs[0].learnings:
        return
    last = runs[0].learnings[-1]
    # Steps before a run was resumed count, but no round has their time.
    earlier = sum(one.earlier for one in learnings)
    whole = wall_time(runs) + earlier
    rows: list[Row] = []
    server = 0.0
    for phase in last.seconds:
        seconds = sum(one.seconds.get(phase, 0.0) for one in learnings)
        server += seconds
        cells = [SECONDS(seconds), SHARE(seconds / whole)]
        rows.append([phase, *cells, *_network(last, phase)])
    totals = {"server in all": server}
    if earlier:
        totals["… before the run was resumed"] = earlier
    trainings = count(len(learnings), "training")
    waited = server - earlier
    caption = f"{trainings}, the last one on {last.rows} uploads"
    if len(runs) > 1:
        caption = (
            f"{trainings} of {len(runs)} seeds; networks are those of seed "
            f"{runs[0].facts['seed']}, the last time on {last.rows} uploads"
        )
    if not isnan(last.waited):
        # Clients went on while the server learnt.
        waited = sum(one.waited for one in learnings)
        totals["… behind clients' rounds"] = sum(one.hidden for one in learnings)
        totals["… clients waited"] = waited
        if not isnan(last.staleness):
            late = count(int(last.staleness), "round")
            caption += f", its rows used {late} later"
    # A run that is shown without those beside it cannot tell their servers' time apart.
    beside = len(runs) == 1 and (runs[0].stacks > 1).any()
    rest = "clients, other runs and the rest" if beside else "clients and the rest"
    totals[rest] = whole - earlier - waited
    for name, seconds in totals.items():
        rows.append([name, SECONDS(seconds), SHARE(seconds / whole), "", "", ""])
    columns = ("server", "seconds", "share", "parameters", "samples/s", "of peak")
    yield Table(columns, rows, caption)
    # A record's options of its method are unchecked.
    stage = runs[0].config.get("zero_stage")
    yield from _memory(last, stage if isinstance(stage, int) else 0)


def _memory(last: LearningRecord, stage: int) -> Iterator[Table]:
    """Yield what the ZeRO stage promises a server rank, beside what was measured."""
    rows: list[Row] = []
    for network, parts in last.promised.items():
        promised, measured = sum(parts.values()), last.training_memory[network]
        # Older records have none, and CPUs measure nothing.
        if not isnan(promised) and (stage or not isnan(measured)):
            sizes = [*parts.values(), promised, measured]
            rows.append([network, *map(BYTES, sizes)])
    if rows:
        ranks = count(len(last.peak_memory), "rank")
        columns = ("memory of a server rank", *PROMISED, "promised", "measured")
        caption = (
            f"ZeRO {stage} on {ranks}; activations come on top of these; measured: the "
            "most from the engine's start to the last step, beside what was held before"
        )
        yield Table(columns, rows, caption)


def _network(last: LearningRecord, name: str) -> Row:
    """Return cells about one of the server's networks, from its last training."""
    if name not in last.parameters:  # a phase that trains no network
        return "", "", ""
    of_peak = last.utilisation[name]
    return (
        COUNT(last.parameters[name]),
        COUNT(last.samples_per_second[name]),
        "" if isnan(of_peak) else SHARE(of_peak),  # the peak is known only for GPUs
    )


# The costs: rows of a name and a figure.

Costs = Iterator[tuple[str, str | Cell]]


def of_costs(runs: Sequence[RunRecord]) -> Table:
    """Return everything that adds up over the first of these runs, and its peak values.
    Times, memory and energy belong to the process, and so to all of them.
    """
    return Table(("cost", ""), list(_costs(runs[0], runs)))


def _whose(last: LearningRecord) -> Costs:
    """Yield how many generated updates, and uploads, are recognised as their client's."""
    for name, share in (
        ("generated updates in their own client's direction", last.own),
        ("uploads in their own client's direction", last.own_uploads),
        ("generated rows nearest to their own client's updates", last.kept),
        ("uploads nearest to them", last.kept_uploads),
    ):
        if not isnan(share):
            yield name, WHOLE_PERCENT(share)


def _costs(record: RunRecord, runs: Sequence[RunRecord]) -> Costs:
    timed = timed_run(runs)
    totals = [series for series in ROUND_SERIES.values() if series.total]
    for series in totals:
        if series.unit == "bytes":
            values = record.rounds[series.name]
            yield series.total, BYTES(float(np.nansum(values)))
            yield f"{series.total} per round", BYTES(record.mean(series.name))
    if record.new_rounds is not None:
        new = record.new_rounds
        for way, sent in (("by", new.bytes_up), ("to", new.bytes_down)):
            yield (
                f"sent {way} new clients in their rounds",
                BYTES(float(np.nansum(sent))),
            )
    if not isnan(record.newcomer_bytes):
        yield "sent to a new client to begin with", BYTES(record.newcomer_bytes)
    # What other ranks took before a resume says nothing of these.
    since = f", from round {timed.untimed + 1} on" if timed.untimed else ""
    yield f"peak memory of a rank{since}", BYTES(float(timed.peak_memory.max()))
    if len(timed.peak_memory) > 1:
        average = float(timed.peak_memory.mean())
        yield f"peak memory of a rank, mean{since}", BYTES(average)
    for series in totals:
        if series.unit != "bytes":
            yield from _total(record, series, timed)
    if record.learnings:
        last = record.learnings[-1]
        yield "uploads that the server learnt from", COUNT(last.rows)
        yield "peak memory of a server rank", BYTES(float(most_memory(runs).max()))
        yield from _whose(last)
    reached = record.rounds_to(0.95)
    if reached is not None:
        yield "rounds to 95 % of the clients' own peak", COUNT(reached)
    # GenFed's supplement: the server's validation data leaks to the clients.
    if record.config.get("supplement"):
        leaked = record.facts["leaked_samples"]
        text = f"{leaked} of {record.facts['validation_samples']}"
        yield "validation samples that clients were given", COUNT(leaked, text)
    # How evenly clients were spread over ranks, and when they were relocated.
    imbalance = timed.imbalance()
    if record.facts["ranks"] > 1 and not isnan(imbalance):
        yield "slowest rank's training by the mean", HUNDREDTHS(imbalance)
    if record.moves:
        yield "clients changed ranks after round", ", ".join(map(str, record.moves))
    if timed.energy is not None and not isnan(timed.energy):
        # The server's ranks do not count their GPUs' energy.
        workers = record.config.get("server_ranks")
        whose = "of the workers' GPUs" if workers else "of all GPUs"
        yield f"energy {whose}", JOULES(timed.energy)
    if timed.cpu_energy is not None and not isnan(timed.cpu_energy):
        # The counters belong to the machine, so they include all other work there.
        yield "energy of the hosts' CPUs and memory", JOULES(timed.cpu_energy)


def _total(record: RunRecord, series: RoundSeries, timed: RunRecord) -> Costs:
    """Yield the sum of a series over all rounds, unless there was nothing to count."""
    values = record.rounds[series.name]
    total = float(np.nansum(values))
    # Shown as a share of the selected uploads, even if it is zero.
    if series.name == "kept_attackers":
        selected = int(np.nansum(record.rounds["kept"]))
        if selected and record.config.get("attack", "none") != "none":
            text = f"{int(total)} ({total / selected:.0%})"
            yield series.total, COUNT(total, text)
    elif series.name == "arrived":
        share = record.arrived_share()
        if not isnan(share):
            yield series.total, COUNT(total, f"{int(total)} ({share:.1%})")
        elif total:
            # A method without rounds has no time limit.
            yield "uploads that arrived", COUNT(total)
    elif series.unit == "clients":
        if int(total):
            yield series.total, COUNT(total)
    elif series.name in WORK:
        counted = float(values.sum())
        if counted > 0:
            kind = FLOP if series.name.endswith("flops") else COUNT
            yield series.total, kind(counted)
        # Older versions did not record it, for which one line is enough.
        elif isnan(counted) and series.name == WORK[0]:
            yield series.total, "unknown: an older version did not count them"
    else:
        name = series.total
        if series.name == "cpu_seconds" and record.config.get("server_ranks"):
            name = "time on cores, ranks that host clients"
        yield name, WALL_TIME(float(np.nansum(timed.rounds[series.name])))


# Between clients and server: a virtual clock, and privacy.


def round_seconds(record: RunRecord) -> np.ndarray:
    """Return the virtual seconds of each single round."""
    return np.diff(record.rounds["virtual_seconds"], prepend=0.0)


def of_virtual_time(record: RunRecord, times: Times) -> Iterator[Table]:
    """Yield what rounds and their members took on the virtual clock."""
    rows: list[Row] = []
    if record.has_clock:
        whole = record.last("virtual_seconds")
        rows.append(["virtual time of all rounds", TIME(whole)])
        seconds = round_seconds(record)
        for name, share in (("shortest", 0.0), ("median", 0.5), ("longest", 1.0)):
            of_round = TIME(float(np.nanquantile(seconds, share)))
            rows.append([f"{name} round", of_round])
    staleness = record.mean("staleness")
    if not isnan(staleness):
        rows.append(["versions that an upload was behind", HUNDREDTHS(staleness)])
    if rows:
        yield Table(("by the virtual clock", ""), rows)
    yield from _members(times)


def _members(times: Times) -> Iterator[Table]:
    """Yield the distribution of members' seconds, if a run has recorded them."""
    spent = {name: times.get(column, np.empty(0)) for name, column in PARTS.items()}
    parts = np.array(list(spent.values()))
    # The time of an upload that never arrived is unknown.
    came = np.isfinite([*parts, times.get("arrival", parts[0])]).all(0)
    if not came.any():
        return
    spent["in all"] = parts.sum(0)
    rows: list[Row] = []
    for name, seconds in spent.items():
        ends = np.quantile(seconds[came], list(SHARES.values())).tolist()
        rows.append([name, *map(TIME, ends)])
    caption = "virtual time of a client in a round, over all uploads that came"
    yield Table(("a client's round", *SHARES), rows, caption)


def of_privacy(record: RunRecord) -> Iterator[Table]:
    """Yield the norm that updates were clipped to, and the privacy spent."""
    rows: list[Row] = []
    clip_norm = record.last("clip_norm")
    if not isnan(clip_norm):
        kind = Kind("1", formatted(".4g"))
        rows.append(["norm that updates were clipped to", kind(clip_norm)])
    epsilon = record.last("epsilon")
    if not isnan(epsilon):
        text = f"ε {epsilon:.3g}"
        delta = record.facts.get("delta")
        if delta is not None:
            text += f" at δ {delta:.2g}"
        rows.append(["privacy spent", PLAIN(epsilon, text)])
    if rows:
        yield Table(("privacy", ""), rows)
