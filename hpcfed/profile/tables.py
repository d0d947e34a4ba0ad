"""Printed tables of a profile."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hpcfed.analysis.findings import COUNT, SHARE, Kind, Row, Table
from hpcfed.analysis.groups import MOST_VARIATION
from hpcfed.analysis.render.console import Output, say
from hpcfed.analysis.render.console import print_tables as print_findings
from hpcfed.analysis.run_findings.costs import TOTAL_SECONDS
from hpcfed.analysis.run_findings.profile import of_parts
from hpcfed.plan.ceilings import TRIALS, Ceilings
from hpcfed.profile.timeline import ROUNDS, Timeline
from hpcfed.profile.verdict import Workload, words
from hpcfed.results.folder import PROFILE, TRACE
from hpcfed.results.profiles import Session
from hpcfed.results.run import RunRecord
from hpcfed.runtime.timer import PHASES
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


def print_tables(
    console: Output, record: RunRecord, timelines: list[Timeline], *, cuda: bool
) -> None:
    """Print seconds by phase, the server's seconds, and the longest operators."""
    # From the whole run down to single kernels.
    tables = [_phase_table(record)]
    if record.learnings:
        tables.append(_server_table(record))
    for session in _first_sessions(timelines):
        tables.append(_operator_table(session, cuda=cuda))
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
