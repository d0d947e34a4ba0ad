"""Runs under the profiler, interprets what it recorded, and writes and prints the
results.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpcfed.analysis.findings import COUNT, SHARE, Kind, Row, Table
from hpcfed.analysis.noise import MOST_VARIATION
from hpcfed.analysis.render.console import Output, say
from hpcfed.analysis.render.console import print_tables as print_findings
from hpcfed.analysis.run_findings.costs import TOTAL_SECONDS
from hpcfed.analysis.run_findings.profile import of_parts
from hpcfed.errors import unless_full
from hpcfed.experiment.run import run
from hpcfed.options import Settings
from hpcfed.plan.ceilings import TRIALS, Ceilings
from hpcfed.profile.timeline import ROUNDS, Timeline, lanes, trace
from hpcfed.profile.verdict import ProfiledRun, Workload, advice, words, workloads
from hpcfed.profile.watch import ProfileWatch
from hpcfed.results.folder import PROFILE, TRACE
from hpcfed.results.json_values import plain
from hpcfed.results.profiles import Session
from hpcfed.results.publish import publish
from hpcfed.results.run import RunRecord
from hpcfed.results.stored import read_run
from hpcfed.runtime.launcher import launched
from hpcfed.runtime.timer import PHASES, observed_by
from hpcfed.server.options import NETWORKS
from hpcfed.words import bytes_text, formatted

Advised = list[tuple[Workload, list[str]]]
"""The run's workloads, each with options that may help."""


def profile_run(settings: Settings, *, warmup: int, active: int, nvtx: bool) -> None:
    """Run; then, on the root, write trace.json and profile.json beside run.h5 and print
    their contents.
    """
    watch = ProfileWatch(
        warmup=warmup, active=active, rounds=settings.config.rounds, nvtx=nvtx
    )
    with observed_by(watch):
        folder = run(settings)
    # The other ranks have sent their timelines, and are done.
    if folder is None:
        return
    record = read_run(folder)
    # Measured after the run, when the device is idle.
    ceilings = {"float32": Ceilings.of(watch.device)}
    if record.config.get("server_precision") == "bf16":
        ceilings["bfloat16"] = Ceilings.of(watch.device, torch.bfloat16)
    cuda = watch.device.type == "cuda"
    measured = ProfiledRun(
        _recorded(settings, record), record, watch.timelines, ceilings, cuda
    )
    # What to change next depends on the run's options.
    advised = []
    for workload in workloads(measured):
        server = workload.name in NETWORKS
        tips = advice(workload, record.config, cuda=cuda, server=server)
        advised.append((workload, tips))
    _write(folder, watch, measured, advised)
    with unless_full(f"all figures are in {folder / PROFILE}"):
        _print(folder, watch, measured, advised)


def _recorded(settings: Settings, record: RunRecord) -> Settings:
    """Return the settings with the options that the run has recorded.

    Some are chosen at the start from the devices of the server's ranks, which may
    differ from the root's.
    """
    kind = type(settings.options)
    values = {name: record.config[name] for name in kind.model_fields}
    return replace(settings, options=kind(**values))


def _write(
    folder: Path, watch: ProfileWatch, measured: ProfiledRun, advised: Advised
) -> None:
    timeline = json.dumps(trace(watch.timelines))
    publish(timeline.encode(), folder / TRACE)
    content = plain(_content(watch, measured, advised))
    publish(json.dumps(content, indent=1).encode(), folder / PROFILE)


def _content(
    watch: ProfileWatch, measured: ProfiledRun, advised: Advised
) -> dict[str, Any]:
    """Return the contents of profile.json."""
    record = measured.record
    # Keep the keys of earlier versions: other programs read this file, too.
    parts = []
    for workload, tips in advised:
        judged = {
            "bound": workload.bound,
            "words": words(workload, cuda=measured.cuda),
            "next": tips,
        }
        parts.append(asdict(workload) | judged)
    phases = {}
    for i, name in enumerate(PHASES):
        phases[name] = record.phases[:, :, i].sum(0).tolist()
    server = []
    for learning in record.learnings:
        server.append({"round": learning.round, "seconds": learning.seconds})
    ranks = []
    for line, of_rank in zip(watch.timelines, lanes(watch.timelines), strict=True):
        facts = {
            "rank": line.rank,
            "role": line.role,
            "host": line.host,
            "device": line.device,
            "memory": line.memory,
            "sessions": [session.model_dump() for session in line.sessions],
            "lanes": of_rank,
        }
        ranks.append(facts)
    ceilings = measured.ceilings
    return {
        "device": watch.timeline.device,
        "ceilings": {name: asdict(ceiling) for name, ceiling in ceilings.items()},
        "parts": parts,
        "phases": phases,
        "server": server,
        "ranks": ranks,
        "config": record.config,
        "environment": record.environment,
    }


def _print(
    folder: Path, watch: ProfileWatch, measured: ProfiledRun, advised: Advised
) -> None:
    # Output of ranks goes through their launcher, so it never reaches a terminal
    # directly.
    console = Output(force_terminal=None if launched().alone else False)
    cuda = measured.cuda
    profile_run.print_tables(console, measured.record, watch.timelines, cuda=cuda)
    profile_run.print_verdicts(
        console, watch.timeline.device, measured.ceilings, advised, cuda=cuda
    )
    profile_run.print_memory(console, watch.timelines)
    profile_run.print_files(console, folder)


MOST_OPERATORS = 8
"""Most operators to show per session."""
OPERATOR_MS = Kind("s", formatted(".3f"), 1e3)
NAME_LENGTH = 42
"""Length of their names, in characters."""
NOT_QUIET = (
    "The machine was not quiet: trials of its ceilings vary by more than "
    f"{MOST_VARIATION:.0%}, so it may reach more, and shares of them are too large. Take "
    "the node for yourself (sbatch --exclusive), and profile again."
)


def print_tables(
    console: Output, record: RunRecord, timelines: list[Timeline], *, cuda: bool
) -> None:
    """Print seconds by phase, the server's seconds, and the longest operators."""
    # From the whole run down to single kernels.
    tables = [_phase_table(record)]
    if record.learnings:
        profile_run.append(_server_table(record))
    for session in _first_sessions(timelines):
        profile_run.append(_operator_table(session, cuda=cuda))
    for table in tables:
        print_findings(console, [table])
        console.print()


def print_verdicts(
    console: Output,
    device: str,
    ceilings: dict[str, Ceilings],
    workloads: Sequence[tuple[Workload, list[str]]],
    *,
    cuda: bool,
) -> None:
    """Print the ceilings, the workloads compared with them, and a sentence about each
    with what to change next, longest first.
    """
    for name, ceiling in ceilings.items():
        say(
            console,
            f"{device}, measured: {name} products {ceiling.flops / 1e12:.3g} TFLOP/s, "
            f"copies {ceiling.bytes_per_second / 1e9:.3g} GB/s "
            f"(best of {TRIALS} trials, which vary by {ceiling.variation:.1%})",
        )
    if any(ceiling.variation > MOST_VARIATION for ceiling in ceilings.values()):
        say(console, NOT_QUIET)
    print_findings(console, [of_parts([workload for workload, _ in workloads])])
    console.print()
    # The longest comes first, because a change pays most there.
    longest_first = sorted(workloads, key=lambda both: -both[0].seconds)
    for workload, tips in longest_first:
        lines = [f"   next: {tip}" for tip in tips]
        say(console, words(workload, cuda=cuda), *lines)


def print_memory(console: Output, timelines: list[Timeline]) -> None:
    """Print which rank used the most memory, and when."""
    most = 0
    where = ""
    for line in timelines:
        for seconds, used in line.memory:
            if used > most:
                most = used
                where = f"on rank {line.rank}, {seconds:.1f} s after the start"
    say(console, f"most memory: {bytes_text(most)} {where}")


def print_files(console: Output, folder: Path) -> None:
    """Print the paths of the timeline and the figures."""
    say(
        console,
        f"timeline of all ranks: {folder / TRACE} (open it in Perfetto, "
        "https://ui.perfetto.dev, or "
        f"chrome://tracing); all figures: {folder / PROFILE}",
    )


def _phase_table(record: RunRecord) -> Table:
    """Return each rank's seconds over the whole run, longest phase first."""
    # Summed over rounds: [ranks, phases].
    sums = record.phases.sum(0)
    rows: list[Row] = []
    for i in np.argsort(-sums.mean(0), kind="stable"):
        by_rank = sums[:, i]
        # Phases that a method does not have are left out.
        if by_rank.any():
            rows.append([PHASES[i], *map(TOTAL_SECONDS, by_rank.tolist())])
    ranks = [f"rank {rank}" for rank in range(len(sums))]
    return Table(("seconds by phase", *ranks), rows)


def _server_table(record: RunRecord) -> Table:
    """Return the seconds of every learning, by phase."""
    rows: list[Row] = []
    for phase in record.learnings[0].seconds:
        seconds = [learning.seconds[phase] for learning in record.learnings]
        rows.append([phase, *map(TOTAL_SECONDS, seconds)])
    titles = [f"after round {learning.round + 1}" for learning in record.learnings]
    return Table(("the server's seconds", *titles), rows)


def _first_sessions(timelines: list[Timeline]) -> list[Session]:
    """Return one session of each kind, from the first rank that has it."""
    # Other ranks do the same work, so their tables would repeat this one.
    found: dict[str, Session] = {}
    for line in timelines:
        for session in line.sessions:
            found.setdefault(session.name, session)
    return list(found.values())


def _operator_table(session: Session, *, cuda: bool) -> Table:
    """Return the longest kernels or operators of a session."""
    unit = "rounds" if session.name == ROUNDS else f"steps of the {session.name}"
    kind = "kernels" if cuda else "operators"
    # Shares refer to all operators, including those not shown.
    total = sum(operator.seconds for operator in session.operators)
    rows: list[Row] = []
    for operator in session.operators[:MOST_OPERATORS]:
        time = OPERATOR_MS(operator.seconds), SHARE(operator.seconds / total)
        rows.append([short_name(operator.name), *time, COUNT(operator.calls)])
    title = f"{kind} in {session.number} {unit}"
    return Table((title, "ms", "share", "calls"), rows)


def short_name(name: str) -> str:
    """Return a kernel's name without the common parts, cut to fit into a table."""
    name = name.removeprefix("void ")
    name = name.replace("at::native::", "")
    if len(name) <= NAME_LENGTH:
        return name
    return name[: NAME_LENGTH - 1] + "…"
