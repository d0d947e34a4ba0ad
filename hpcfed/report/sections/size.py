"""Scaling: time over numbers of ranks, and over numbers of clients."""

from collections.abc import Sequence

from hpcfed.report.charts import Axis, Drawing, Line, lines, spread
from hpcfed.report.groups import Group
from hpcfed.report.labels import ranks_label, scaling_label
from hpcfed.report.scaling import Scaling, slope
from hpcfed.report.sections.section import (
    MOST_LINES,
    Section,
    Table,
    batches,
    by_key_and_ranks,
    estimates_line,
    interval,
    number,
    ticks,
)

LOG_SPREAD = 20
"""From this ratio of the largest to the smallest value on, a scale is logarithmic."""


def ranks(found: Sequence[Scaling]) -> Section:
    section = Section("scaling", "Speed-up and parallel efficiency")
    if not found:
        section.text.append("No options were run on different numbers of ranks.")
        return section
    section.text.append(
        "Strong scaling puts the same clients on more ranks; weak scaling keeps the "
        "number of clients per rank. Speed-up is relative to the fewest ranks, in weak "
        "scaling by clients per second. Efficiency is speed-up divided by its ideal."
    )
    for kind in ("strong", "weak"):
        members = [one for one in found if one.kind == kind]
        for some in batches(members, MOST_LINES):
            section.charts += _charts(kind, some)
    columns = ("options", "scaling", "ranks", "ms per round", "speed-up", "ideal",
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
        "time": (times, Axis("ms per round", log=True)),
        "speed-up": (speedups, Axis("speed-up, times", log=True)),
        "efficiency": (efficiencies, Axis("parallel efficiency, %", zero=True)),
    }
    return [
        lines(f"{kind} scaling: {what}", some, x, y)
        for what, (some, y) in drawn.items()
    ]


def clients(every: Sequence[Group]) -> Section:
    section = Section("clients", "Scaling by clients")
    rounds, each = [], []
    for (key, count), members in by_key_and_ranks(every).items():
        # A line needs two points.
        if len(members) > 1:
            name = ranks_label(key, count)
            rounds.append(_round_line(name, members))
            each.append(_client_line(name, members))
    if not rounds:
        section.text.append("No options were run with different numbers of clients.")
        return section
    x = Axis("clients", log=True, ticks=ticks(rounds))
    values: list[float] = []
    for line in each:
        values += line.y
    wide = spread(values) > LOG_SPREAD
    per_round = Axis("ms per round", log=True)
    per_client = Axis("ms per client and round", log=wide)
    # The same options stand in the same place of both charts.
    both = zip(
        batches(rounds, MOST_LINES),
        batches(each, MOST_LINES),
        strict=True,
    )
    for some_rounds, some_each in both:
        drawn = lines("time of a round", some_rounds, x, per_round)
        section.charts.append(drawn)
        drawn = lines("time by client that takes part", some_each, x, per_client)
        section.charts.append(drawn)
    columns = ("options", "clients", "ms per client, fewest", "ms per client, most",
               "power of clients")  # fmt: skip
    rows = []
    for whole, one in zip(rounds, each, strict=True):
        rows.append(_power_row(whole, one))
    caption = "time grows as clients to this power: 1 is proportional, 0 is flat"
    section.tables.append(Table(columns, rows, caption))
    return section


def _round_line(name: str, members: Sequence[Group]) -> Line:
    x = [group.clients for group in members]
    return estimates_line(name, x, [group.seconds for group in members], 1e3)


def _client_line(name: str, members: Sequence[Group]) -> Line:
    """Return milliseconds per client that takes part in a round."""
    x = [float(group.clients) for group in members]
    y = []
    for group in members:
        # Only clients that take part cost time.
        per_client = 1e3 / group.cohort
        y.append(group.seconds.centre * per_client)
    return Line(name, x, y)


def _power_row(whole: Line, each: Line) -> list[str]:
    x = whole.x
    return [
        whole.name,
        f"{x[0]:,.0f} … {x[-1]:,.0f}",
        number(each.y[0]),
        number(each.y[-1]),
        number(slope(x, whole.y)),
    ]
