"""Results of `hpcfed profile`: where the time goes, what limits it, what to try."""

from collections.abc import Sequence
from math import nan

from hpcfed.analysis.findings import SECONDS, SHARE, Kind, Row, Table
from hpcfed.analysis.groups import MOST_VARIATION
from hpcfed.analysis.render.charts import (
    Axis,
    Drawing,
    ScatterPoint,
    Stretch,
    scatter,
    stripes,
    timeline,
)
from hpcfed.analysis.render.sections.section import Section
from hpcfed.results.profiles import Operator, Part, Profile, Rank
from hpcfed.runtime.timer import PHASES
from hpcfed.words import number

MOST_OPERATORS = 8
"""Most operators that a chart names; the others share one more bar."""
MOST_RANKS = 32
"""Most ranks in a timeline; of more, the first ones and the server's."""
MOST_LANES = 400
"""Most intervals of a rank's time to draw."""
TERAFLOPS = Kind("FLOP/s", number, 1e-12)
GIGABYTES = Kind("bytes/s", number, 1e-9)
NEAR_ROOFS = 1.5
"""Plateaus whose speeds differ by no more than this factor share a name below them: a
name between them would cover a line.
"""
TERA = 1e13
"""FLOP/s from which on an axis is in TFLOP/s."""
MARGIN = 4.0
"""How far the roofs extend beyond parts and corners, as a factor."""


def profile(found: Profile) -> Section:
    """Make the section of a profiled run."""
    section = Section("profile", "Profile")
    # The longest comes first, because a change pays most there.
    longest_first = sorted(found.parts, key=lambda part: -part.seconds)
    for part in longest_first:
        text = part.words[:1].upper() + part.words[1:].rstrip(".") + "."
        advice = f" Next: {'; '.join(part.next)}." if part.next else ""
        section.text.append(text + advice)
    worst = max((one.variation for one in found.ceilings.values()), default=0.0)
    if worst > MOST_VARIATION:
        section.text.append(
            f"The machine was not quiet: trials of its ceilings vary by {worst:.0%}. It "
            "may reach more, and then shares of them are smaller than shown."
        )
    drawn = _roofline(found)
    if drawn:
        section.text.append(
            "On the roofline's slope, memory copies limit a part; on its plateau, matrix "
            "products do. Only bytes that must move are counted: with all of them, "
            f"parts would lie further left.{_not_drawn(found)}"
        )
    section.charts += drawn
    section.charts += _ranks(found.ranks)
    section.tables.append(of_parts(found.parts))
    rows: list[Row] = []
    for name, one in found.ceilings.items():
        speeds = [TERAFLOPS(one.flops), GIGABYTES(one.bytes_per_second)]
        rows.append([name, *speeds, SHARE(one.variation)])
    if rows:  # older profiles have no ceilings
        columns = ("ceiling", "products, TFLOP/s", "copies, GB/s", "trials vary by")
        measured = (
            f"measured on {found.device} after the run, the best of several trials"
        )
        section.tables.append(Table(columns, rows, measured))
    return section


def of_parts(parts: Sequence[Part]) -> Table:
    """Return the time of each part, and its share of the measured ceilings."""
    rows: list[Row] = []
    for part in parts:
        shares = (part.busy, part.compute, part.bandwidth)
        warm = SECONDS(nan if part.warm is None else part.warm)
        cells = [SHARE(nan if share is None else share) for share in shares]
        rows.append([part.name, SECONDS(part.seconds), warm, *cells])
    head = "beside these ceilings"
    return Table(
        (head, "seconds", "warm", "busy", "MFU", "bandwidth, at least"),
        rows,
        # Without this line a reader would relate the run's FLOPs to the first column.
        "warm: at the pace of the last rounds or steps; MFU and bandwidth refer to it",
    )


def _reached(found: Profile, part: Part) -> tuple[float, float] | None:
    """Return a part's FLOP per byte and its FLOP/s; None if one is not counted."""
    roof = found.ceilings.get(part.numbers)
    copies = found.ceilings.get("float32", roof)
    if roof is None or copies is None or not part.compute or not part.bandwidth:
        return None
    flops = part.compute * roof.flops
    moved = part.bandwidth * copies.bytes_per_second
    # An untrusted file may have numbers that are too small.
    return (flops / moved, flops) if moved > 0 else None


def _not_drawn(found: Profile) -> str:
    """Say which parts the roofline leaves out, and why; empty if none."""
    missing: dict[str, list[str]] = {}
    for part in found.parts:
        if _reached(found, part) is None:
            what = "bytes" if part.compute else "operations"
            missing.setdefault(what, []).append(part.name)
    told = []
    for what, names in missing.items():
        told.append(f"{', '.join(names)}, whose {what} are not counted")
    return f" Left out: {'; '.join(told)}." if told else ""


def _roofline(found: Profile) -> list[Drawing]:
    """Draw what each part reaches under the measured roofs: bytes times FLOP per byte,
    up to the speed of matrix products.
    """
    fastest = max((one.flops for one in found.ceilings.values()), default=0.0)
    unit, scale = ("TFLOP/s", 1e-12) if fastest >= TERA else ("GFLOP/s", 1e-9)
    reached = []
    for part in found.parts:
        at = _reached(found, part)
        if at is not None:
            reached.append(ScatterPoint(at[0], scale * at[1], series=part.name))
    if not reached:
        return []
    return [
        scatter(
            "roofline: what is reached of what the device can do",
            reached,
            Axis("FLOP per byte that must at least be moved (log)", log=True),
            Axis(f"{unit} of a rank (log)", log=True),
            roofs=_roofs(found, [point.x for point in reached], scale),
        )
    ]


def _roofs(
    found: Profile, intensities: Sequence[float], scale: float
) -> list[tuple[str, list[tuple[float, float]]]]:
    """Return the name and the roof of each number type, the highest first: a slope, a
    corner, and a plateau.
    """
    every = found.ceilings
    bandwidth = every.get("float32", next(iter(every.values()))).bytes_per_second
    ridges = [one.flops / bandwidth for one in every.values()]
    left = min(*intensities, *ridges) / MARGIN
    right = max(*intensities, *ridges) * MARGIN
    roofs = []
    names: list[str] = []
    highest_first = sorted(every.items(), key=lambda item: -item[1].flops)
    for place, (name, one) in enumerate(highest_first):
        across = [left, one.flops / bandwidth, right]
        corners = [(at, scale * min(one.flops, at * bandwidth)) for at in across]
        names.append(name)
        below = highest_first[place + 1 : place + 2]
        if below and one.flops <= NEAR_ROOFS * below[0][1].flops:
            roofs.append(("", corners))
        else:
            roofs.append((f"{', '.join(names)} products", corners))
            names = []
    return roofs


def _ranks(ranks: Sequence[Rank]) -> list[Drawing]:
    """Draw what each rank did when, including the server's ranks."""
    servers = [rank for rank in ranks if rank.role == "server"]
    workers = [rank for rank in ranks if rank.role != "server"]
    shown = [*workers[: max(1, MOST_RANKS - len(servers))], *servers][:MOST_RANKS]
    stretches = []
    for rank in shown:
        row = f"rank {rank.rank}"
        if servers:
            row += ", server" if rank in servers else ", clients"
        for lane in rank.lanes[:MOST_LANES]:
            stretches.append(Stretch(row, lane.begin, lane.end, lane.name))
    if not stretches:
        return []
    title = "what every rank did, by what took most of each moment"
    names = _colours([stretch.series for stretch in stretches])
    x = Axis("seconds since the start", zero=True)
    return [timeline(title, stretches, x, names=names)]


def _colours(shown: Sequence[str]) -> list[str]:
    """Return names in the order of their colours: phases have the same colours as in
    other charts, and the server's parts those of absent phases.
    """
    names = list(PHASES)
    free = [name for name in names if name not in shown]
    for name in dict.fromkeys(shown):
        if name in names:
            continue
        if free:
            names[names.index(free.pop(0))] = name
        else:
            names.append(name)
    return names


def operators(found: Profile) -> Section:
    """Make the section of the longest operators or kernels of each session."""
    section = Section("operators", "Operators")
    for session in found.sessions:
        if not session.operators:
            continue
        title = f"operators in {session.number} {session.unit}"
        names, milliseconds = _longest(session.operators)
        drawn = stripes(title, names, {"ms": milliseconds}, Axis("ms in all"))
        section.charts.append(drawn)
    return section


def _longest(operators: list[Operator]) -> tuple[list[str], list[float]]:
    """Return names and milliseconds of the longest, and of all others together."""
    ordered = sorted(operators, key=lambda operator: -operator.seconds)
    names, milliseconds = [], []
    for operator in ordered[:MOST_OPERATORS]:
        calls = f"{operator.calls:,} calls" if operator.calls != 1 else "1 call"
        names.append(f"{operator.name.removeprefix('void ')} ({calls})")
        milliseconds.append(1e3 * operator.seconds)
    others = ordered[MOST_OPERATORS:]
    if others:
        names.append(f"{len(others)} others")
        milliseconds.append(1e3 * sum(operator.seconds for operator in others))
    return names, milliseconds
