"""What the server's model costs: its learning by part, how it fits between rounds, and
how it grows.
"""

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

from hpcfed.analysis.findings import COUNT, MEBIBYTES, PER_CENT_OF, PLAIN, Row, Table
from hpcfed.analysis.groups import Group
from hpcfed.analysis.render.charts import Axis, Drawing, Line
from hpcfed.analysis.render.sections.section import (
    MOST_LINES,
    Section,
    by_key,
    few_bars,
    held_text,
    line_charts,
    stacked_bars,
    ticks,
    which,
)
from hpcfed.analysis.server_costs import (
    ServerCost,
    ServerGrowth,
    over_clients,
    over_columns,
    over_server_ranks,
    server_costs,
)
from hpcfed.analysis.server_findings import server_tables
from hpcfed.analysis.swept import Swept
from hpcfed.results.stored import most_memory, wall_time
from hpcfed.results.study import StudyRecord
from hpcfed.words import MIB

SERVER_COLUMNS = (
    "options", "clients", "server ranks", "network", "parameters", "samples per second",
    "of peak, %", "peak memory, MiB", "server's share of the run, %",
)  # fmt: skip


def server(
    every: Sequence[Group],
    options: Sequence[Swept],
    studies: Sequence[StudyRecord] = (),
) -> Section:
    """Show what the training of the server's model took, whether it fits between
    rounds, how it grows, and how fast its networks were.
    """
    section = Section("server", "Server")
    members = [group for group in every if group.first.learnings]
    if not members:
        return section
    costs = server_costs(every, studies)
    section.charts += _growth_charts(costs)
    section.tables += server_tables(costs)
    # Runs of different versions may name their phases differently.
    names: dict[str, None] = {}
    for group in members:
        for run in group.runs:
            for learning in run.learnings:
                names |= dict.fromkeys(learning.seconds)
    shown = few_bars(members, options)
    section.text += held_text(shown)
    section.charts += stacked_bars(
        shown.groups,
        lambda group: {name: _learning_seconds(group, name) for name in names},
        Axis("seconds of learning"),
    )
    rows: list[Row] = []
    for family in by_key(members).values():
        for group in family:
            rows += _network_rows(group, list(names))
    section.tables.append(Table(SERVER_COLUMNS, rows))
    section.text.append(
        "The server fits between rounds if one learning takes no longer than clients "
        "work until the next. Bars are named clients on ranks. The share of the peak is "
        "known only for GPUs."
    )
    return section


def _growth_charts(costs: Sequence[ServerCost]) -> Iterator[Drawing]:
    """Draw time and memory over columns, clients and server ranks."""
    for found in (over_columns(costs), over_clients(costs), over_server_ranks(costs)):
        grown = [one for one in found if len(set(one.sizes)) > 1]
        if not grown:
            continue
        over = grown[0].over
        yield from _drawn(
            grown,
            f"seconds of the server over {over}",
            Axis("seconds of a learning", log=True),
            lambda one: one.whole,
        )
        yield from _drawn(
            grown,
            f"memory of a server rank over {over}",
            Axis("peak memory, MiB", log=True),
            lambda one: max(one.memory) / MIB,
        )


def _drawn(
    grown: Sequence[ServerGrowth],
    title: str,
    y: Axis,
    figure: Callable[[ServerCost], float],
) -> Iterator[Drawing]:
    drawn = []
    for one in grown[:MOST_LINES]:
        drawn.append(Line(one.name, one.sizes, [figure(point) for point in one.points]))
    x = Axis(grown[0].over, log=True, ticks=ticks(drawn))
    yield from line_charts(title, drawn, x, y)


def _learning_seconds(group: Group, phase: str) -> float:
    """Return the seconds of a phase over all trainings of the server's model, for all
    seeds of a process, as the mean over processes.
    """
    totals = []
    for process in group.processes:
        total = 0.0
        for run in process.runs:
            for learning in run.learnings:
                total += learning.seconds.get(phase, 0.0)
        totals.append(total)
    return fmean(totals)


def _network_rows(group: Group, phases: Sequence[str]) -> list[Row]:
    """Return a row for each of the server's networks, from its last training."""
    # The last training represents all: the first one also warms up.
    last = group.first.learnings[-1]
    seconds = sum(_learning_seconds(group, phase) for phase in phases)
    whole = fmean(wall_time(process.runs) for process in group.processes)
    name, clients, _ = which(group)
    rows: list[Row] = []
    for network, parameters in last.parameters.items():
        rows.append(
            [
                name,
                clients,
                str(group.options.get("server_ranks", 0)),
                network,
                COUNT(parameters),
                PLAIN(last.samples_per_second[network]),
                PER_CENT_OF(last.utilisation[network]),
                # These two belong to the server as a whole, so they are the same for
                # all its networks.
                MEBIBYTES(float(most_memory(group.runs).max())),
                PER_CENT_OF(seconds / whole),
            ]
        )
    return rows
