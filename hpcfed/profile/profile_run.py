"""Runs under the profiler, writes what it recorded, and prints what that means."""

import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from hpcfed.analysis.findings import COUNT, SHARE, Kind, Row, Table
from hpcfed.analysis.groups import MOST_VARIATION
from hpcfed.analysis.render.console import Output, print_tables, say
from hpcfed.analysis.render.run_page.profile import of_parts
from hpcfed.analysis.run_findings.costs import TOTAL_SECONDS
from hpcfed.errors import unless_full
from hpcfed.experiment.run import run
from hpcfed.kernels.cuda import one_after_the_other
from hpcfed.options import Settings
from hpcfed.plan.speeds import TRIALS, Ceilings
from hpcfed.profile.timeline import Timeline, lanes, trace
from hpcfed.profile.verdict import ProfiledRun, advice, words, workloads
from hpcfed.profile.watch import ProfileWatch
from hpcfed.results.as_json import plain
from hpcfed.results.folder import PROFILE, TRACE
from hpcfed.results.profiles import ROUNDS, Profile, Session
from hpcfed.results.publish import publish
from hpcfed.results.run import RunRecord
from hpcfed.results.stored import read_run
from hpcfed.runtime import accelerator
from hpcfed.runtime.starting import PARTS, WORKS
from hpcfed.runtime.timer import PHASES, observed_by
from hpcfed.server.options import NETWORKS
from hpcfed.words import bytes_text, formatted

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

UNPROFILED = (
    "No round was profiled by kernel, so it is unknown how busy the device was: the "
    "first round warms up. Give --rounds 2 or more."
)


def profile_run(settings: Settings, *, warmup: int, active: int, nvtx: bool) -> None:
    """Run; then, on the root, write trace.json and profile.json and print them."""
    watch = ProfileWatch(
        warmup=warmup, active=active, rounds=settings.config.rounds, nvtx=nvtx
    )
    with observed_by(watch), one_after_the_other():
        folder = run(settings)
    # The other ranks have sent their timelines, and are done.
    if folder is None:
        return
    record = read_run(folder)
    # Measured after the run, when the device is idle.
    ceilings = {"float32": Ceilings.of(watch.device)}
    if record.config.get("server_precision") == "bf16":
        ceilings["bfloat16"] = Ceilings.of(watch.device, torch.bfloat16)
    cuda = accelerator.is_gpu(watch.device)
    measured = ProfiledRun(
        _recorded(settings, record), record, watch.timelines, ceilings, cuda
    )
    content = plain(_content(measured, watch.timeline.device))
    publish(json.dumps(trace(watch.timelines)).encode(), folder / TRACE)
    publish(json.dumps(content, indent=1).encode(), folder / PROFILE)
    with unless_full(f"all figures are in {folder / PROFILE}"):
        console = Output()
        # What is printed is what the file says.
        profile = Profile.model_validate(content)
        _print_seconds(
            console, record, profile, kind="kernels" if cuda else "operators"
        )
        if not nvtx and all(session.name != ROUNDS for session in profile.sessions):
            say(console, UNPROFILED)
        print_verdicts(console, profile)
        _print_memory(console, watch.timelines)
        say(
            console,
            f"timeline of all ranks: {folder / TRACE} (open it in Perfetto, "
            "https://ui.perfetto.dev, or "
            f"chrome://tracing); all figures: {folder / PROFILE}",
        )


def _recorded(settings: Settings, record: RunRecord) -> Settings:
    """Return the settings with the options that the run has recorded.

    Some are chosen at the start from the devices of the server's ranks, which may
    differ from the root's.
    """
    kind = type(settings.options)
    values = {name: record.config[name] for name in kind.model_fields}
    return replace(settings, options=kind(**values))


def _content(measured: ProfiledRun, device: str) -> dict[str, Any]:
    """Return the contents of profile.json."""
    record, timelines, cuda = measured.record, measured.timelines, measured.cuda
    # Keep the keys of earlier versions: other programs read this file, too.
    parts = []
    for workload in workloads(measured):
        # What to change next depends on the run's options.
        server = workload.name in NETWORKS
        judged = {
            "bound": workload.bound,
            "words": words(workload, cuda=cuda),
            "next": advice(workload, record.config, cuda=cuda, server=server),
        }
        parts.append(asdict(workload) | judged)
    of_phases = record.phases.sum(0).T.tolist()
    ranks = []
    for line, of_rank in zip(timelines, lanes(timelines), strict=True):
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
    return {
        "device": device,
        "ceilings": {name: one.model_dump() for name, one in measured.ceilings.items()},
        "parts": parts,
        "phases": dict(zip(PHASES, of_phases, strict=True)),
        "server": [
            {"round": learning.round, "seconds": learning.seconds}
            for learning in record.learnings
        ],
        "ranks": ranks,
        "config": record.config,
        "environment": record.environment,
    }


def _print_seconds(
    console: Output, record: RunRecord, profile: Profile, *, kind: str
) -> None:
    """Print seconds by phase, the server's seconds, and the longest operators."""
    # From the whole run down to single kernels.
    tables = [_phase_table(record)]
    if record.starting:
        tables.insert(0, _start_table(record))
    if record.learnings:
        tables.append(_server_table(record))
    tables += [_operator_table(session, kind) for session in profile.sessions]
    for table in tables:
        print_tables(console, [table])
        console.print()


def print_verdicts(console: Output, profile: Profile) -> None:
    """Print the ceilings, the workloads beside them, and what to change next."""
    ceilings = profile.ceilings
    for name, ceiling in ceilings.items():
        say(
            console,
            f"{profile.device}, measured: {name} products "
            f"{ceiling.flops / 1e12:.3g} TFLOP/s, "
            f"copies {ceiling.bytes_per_second / 1e9:.3g} GB/s "
            f"(best of {TRIALS} trials, which vary by {ceiling.variation:.1%})",
        )
    if any(ceiling.variation > MOST_VARIATION for ceiling in ceilings.values()):
        say(console, NOT_QUIET)
    print_tables(console, [of_parts(profile.parts)])
    console.print()
    # The longest comes first, because a change pays most there.
    for part in sorted(profile.parts, key=lambda part: -part.seconds):
        say(console, part.words, *(f"   next: {tip}" for tip in part.next))


def _print_memory(console: Output, timelines: list[Timeline]) -> None:
    """Print which rank used the most memory, and when."""
    most = 0
    where = ""
    for line in timelines:
        for seconds, used in line.memory:
            if used > most:
                most = used
                where = f"on rank {line.rank}, {seconds:.1f} s after the start"
    say(console, f"most memory: {bytes_text(most)} {where}")


def _start_table(record: RunRecord) -> Table:
    """Return what came before the first round on each rank, and what was done once."""
    rows: list[Row] = []
    for part, meaning in PARTS.items():
        of_ranks = record.starting[f"start_{part}"]
        rows.append([meaning, *map(TOTAL_SECONDS, of_ranks.tolist())])
    if record.rounds_done > 1:
        beyond = record.wall[0] - np.median(record.wall[1:], axis=0)
        rows.append(
            ["the first round, beyond a usual one", *map(TOTAL_SECONDS, beyond)]
        )
    for work, meaning in WORKS.items():
        times, of_ranks = record.starting[work], record.starting[f"{work}_seconds"]
        # A run on CPUs has none of this.
        if times.any():
            title = f"{times.max():.0f} {meaning}"
            rows.append([title, *map(TOTAL_SECONDS, of_ranks.tolist())])
    ranks = [f"rank {rank}" for rank in range(len(record.starting["start_world"]))]
    return Table(("seconds of the start", *ranks), rows)


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


def _operator_table(session: Session, kind: str) -> Table:
    """Return the longest kernels or operators of a session."""
    # Shares refer to all operators, including those not shown.
    total = sum(operator.seconds for operator in session.operators)
    rows: list[Row] = []
    for operator in session.operators[:MOST_OPERATORS]:
        time = OPERATOR_MS(operator.seconds), SHARE(operator.seconds / total)
        rows.append([short_name(operator.name), *time, COUNT(operator.calls)])
    title = f"{kind} in {session.number} {session.unit}"
    return Table((title, "ms", "share", "calls"), rows)


def short_name(name: str) -> str:
    """Return a kernel's name without the common parts, cut to fit into a table."""
    name = name.removeprefix("void ")
    name = name.replace("at::native::", "")
    if len(name) <= NAME_LENGTH:
        return name
    return name[: NAME_LENGTH - 1] + "…"
