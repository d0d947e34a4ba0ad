"""Scaling: time over numbers of ranks, and over numbers of clients."""

from collections.abc import Sequence

from hpcfed.analysis.findings import Table
from hpcfed.analysis.groups import Group
from hpcfed.analysis.labels import ranks_label, scaling_label
from hpcfed.analysis.render.charts import Axis, Drawing, Line, lines, spread
from hpcfed.analysis.render.sections.section import (
    LOG_SPREAD,
    MOST_LINES,
    Section,
    batches,
    estimates_line,
    held_text,
    ticks,
)
from hpcfed.analysis.scaling import Growth, Scaling, growths, scalings
from hpcfed.analysis.swept import Swept, held
from hpcfed.results.pace import MS_PER_ROUND
from hpcfed.words import interval, number


def ranks(every: Sequence[Group], options: Sequence[Swept]) -> Section:
    section = Section("scaling", "Speed-up and parallel efficiency")
    found = scalings(every)
    if not found:
        return section
    section.text.append(
        "Strong scaling puts the same clients on more ranks; weak scaling keeps the "
        "number of clients per rank. Speed-up is relative to the fewest ranks, in weak "
        "scaling by clients per second. Efficiency is speed-up divided by its ideal."
    )
    shown = held(every, options, keep=("ranks",), most=MOST_LINES)
    section.text += held_text(shown)
    drawn = scalings(shown.groups)
    for kind in ("strong", "weak"):
        members = [one for one in drawn if one.kind == kind]
        for some in batches(members, MOST_LINES):
            section.charts += _charts(kind, some)
    columns = ("options", "scaling", "ranks", MS_PER_ROUND, "speed-up", "ideal",
               "efficiency, %")  # fmt: skip
    rows = []
    for one in found:
        rows += _rows(one)
    section.tables.append(Table(columns, rows))
    return section


def _name(one: Scaling) -> str:
    return scaling_label(one.key, one.kind, one.clients)


def _rows(one: Scaling) -> list[list[str]]:
    rows = []
    for point, count in enumerate(one.ranks):
        rows.append([
            _name(one),
            one.kind,
            str(count),
            interval(one.seconds[point], 1e3),
            interval(one.speedup[point]),
            number(one.ideal[point]),
            interval(one.efficiency[point], 100),
        ])  # fmt: skip
    return rows


def _charts(kind: str, members: Sequence[Scaling]) -> list[Drawing]:
    """Draw time, speed-up and efficiency over ranks, the last two beside their ideal."""
    times = []
    speedups = []
    efficiencies = []
    for one in members:
        name = _name(one)
        times.append(estimates_line(name, one.ranks, one.seconds, 1e3))
        speedups.append(estimates_line(name, one.ranks, one.speedup))
        efficiencies.append(estimates_line(name, one.ranks, one.efficiency, 100))
    # A tick at each measured number of ranks: people look for these.
    every = ticks(times)
    x = Axis("ranks", log=True, ticks=every)
    # Scalings may begin at different numbers of ranks; the steepest ideal bounds all.
    widest = max(members, key=lambda one: one.ideal[-1])
    over = [float(count) for count in widest.ranks]
    speedups.append(Line("ideal", over, widest.ideal, ideal=True))
    whole = [100.0] * len(every)
    efficiencies.append(Line("ideal", every, whole, ideal=True))
    drawn = {
        "time": (times, Axis(MS_PER_ROUND, log=True)),
        "speed-up": (speedups, Axis("speed-up, times", log=True)),
        "efficiency": (efficiencies, Axis("parallel efficiency, %", zero=True)),
    }
    return [
        lines(f"{kind} scaling: {what}", some, x, y)
        for what, (some, y) in drawn.items()
    ]


def clients(every: Sequence[Group], options: Sequence[Swept]) -> Section:
    section = Section("clients", "Scaling by clients")
    found = growths(every)
    if not found:
        return section
    shown = held(every, options, keep=("clients",), most=MOST_LINES)
    section.text += held_text(shown)
    # There may be more methods than can be held.
    section.charts += _growth_charts(growths(shown.groups)[:MOST_LINES])
    columns = ("options", "clients", "ms per client, fewest", "ms per client, most",
               "times as long", "power of clients")  # fmt: skip
    rows = [_growth_row(one) for one in found]
    caption = "time grows as clients to this power: 1 is proportional, 0 is flat"
    section.tables.append(Table(columns, rows, caption))
    return section


def _growth_charts(found: Sequence[Growth]) -> list[Drawing]:
    """Draw the time of a round, and of a client in it, over clients."""
    rounds, each = [], []
    values: list[float] = []
    for one in found:
        name = ranks_label(one.key, one.ranks)
        rounds.append(estimates_line(name, one.clients, one.seconds, 1e3))
        per_client = [1e3 * seconds for seconds in one.per_client]
        each.append(Line(name, [float(size) for size in one.clients], per_client))
        values += per_client
    x = Axis("clients", log=True, ticks=ticks(rounds))
    per_round = Axis(MS_PER_ROUND, log=True)
    per_client_axis = Axis("ms per client and round", log=spread(values) > LOG_SPREAD)
    return [
        lines("time of a round by clients", rounds, x, per_round),
        lines("time by client that takes part", each, x, per_client_axis),
    ]


def _growth_row(one: Growth) -> list[str]:
    return [
        ranks_label(one.key, one.ranks),
        f"{one.clients[0]:,} … {one.clients[-1]:,}",
        number(1e3 * one.per_client[0]),
        number(1e3 * one.per_client[-1]),
        interval(one.longer),
        interval(one.power),
    ]
