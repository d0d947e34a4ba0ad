"""How a round's time depends on ranks and clients: measurements and a model."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isnan, nan
from operator import attrgetter

from hpcfed.analysis.choices import grouped
from hpcfed.analysis.costmodel import TERMS, Fitted, Measured
from hpcfed.analysis.findings import COUNT, MS, PER_CENT_OF, PLAIN, Kind, Row, Table
from hpcfed.analysis.groups import Group
from hpcfed.analysis.labels import label, ranks_label, scaling_label, size_text
from hpcfed.analysis.render.charts import (
    Axis,
    Drawing,
    Line,
    ScatterPoint,
    lines,
    scatter,
    spread,
)
from hpcfed.analysis.render.sections.section import (
    LOG_SPREAD,
    MOST_LINES,
    Section,
    batches,
    estimates_line,
    held_text,
    ticks,
)
from hpcfed.analysis.scaling import Growth, Scaling, growths, scalings, slope
from hpcfed.analysis.swept import Swept, held
from hpcfed.errors import count
from hpcfed.results.pace import MS_PER_ROUND
from hpcfed.words import DASH, formatted

MOST_MODELS = 2
"""Most models with charts; the tables have all of them."""
MOST_SIZES = 4
"""Most lines of measured points in one chart."""
NEXT = (1, 2, 4)
"""Sizes to predict, as multiples of the largest measured one."""
SIGNED_PER_CENT = Kind("fraction", formatted("+.3g"), 100)
"""An error with a sign, in a column that says %."""


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
            section.charts += _scaling_charts(kind, some)
    columns = ("options", "scaling", "ranks", MS_PER_ROUND, "speed-up", "ideal",
               "efficiency, %")  # fmt: skip
    rows: list[Row] = []
    for one in found:
        for place, number in enumerate(one.ranks):
            cells = [COUNT(number), MS(one.seconds[place]), PLAIN(one.speedup[place])]
            cells += [PLAIN(one.ideal[place]), PER_CENT_OF(one.efficiency[place])]
            rows.append([_name(one), one.kind, *cells])
    section.tables.append(Table(columns, rows))
    return section


def _name(one: Scaling) -> str:
    return scaling_label(one.key, one.kind, one.clients)


def _scaling_charts(kind: str, members: Sequence[Scaling]) -> list[Drawing]:
    """Draw time, speed-up and efficiency over ranks, the last two with their ideal."""
    times = []
    speedups = []
    efficiencies = []
    for one in members:
        name = _name(one)
        times.append(estimates_line(name, one.ranks, one.seconds, 1e3))
        speedups.append(estimates_line(name, one.ranks, one.speedup))
        efficiencies.append(estimates_line(name, one.ranks, one.efficiency, 100))
    # A tick at each measured number of ranks, because readers look for these.
    every = ticks(times)
    x = Axis("ranks", log=True, ticks=every)
    # Scalings may begin at different numbers of ranks; the steepest ideal bounds all.
    widest = max(members, key=lambda one: one.ideal[-1])
    over = [float(number) for number in widest.ranks]
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
    rows: list[Row] = []
    for one in found:
        clients = f"{one.clients[0]:,} … {one.clients[-1]:,}"
        ends = [MS(one.per_client[0]), MS(one.per_client[-1])]
        growth = [PLAIN(one.longer), PLAIN(one.power)]
        rows.append([ranks_label(one.key, one.ranks), clients, *ends, *growth])
    caption = "time grows as clients to this power: 1 is proportional, 0 is flat"
    section.tables.append(Table(columns, rows, caption))
    return section


def _growth_charts(found: Sequence[Growth]) -> list[Drawing]:
    """Draw the time of a round, and per client, over clients."""
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


def cost_model(models: Sequence[Fitted]) -> Section:
    section = Section("model", "Cost model")
    if not models:
        return section
    section.text.append(
        "Seconds per round as a sum of costs, fitted to the points above. Errors are "
        "relative to the time. The model predicts less well far away from what was "
        "measured, because it does not know a machine's other limits."
    )
    # Models with the most points first.
    ordered = sorted(models, key=lambda one: -len(one.points))
    for one in ordered[:MOST_MODELS]:
        section.charts += _model_charts(one)
    if len(models) > MOST_MODELS:
        section.text.append(
            f"Charts show the {MOST_MODELS} models that were fitted to most points."
        )
    used = [
        name for name in TERMS if any(name in one.model.coefficients for one in models)
    ]
    terms: list[Row] = []
    for one in models:
        # In milliseconds, like all times of a round on the page.
        cells = [MS(one.model.coefficients.get(name, nan)) for name in used]
        terms.append([label(one.key), *cells])
    section.tables.append(Table(("options", *used), terms, "coefficients, ms"))
    section.tables += [_checks(models), _predictions(models)]
    return section


def _model_charts(one: Fitted) -> Iterator[Drawing]:
    """Draw the model over ranks or clients, and against the measured times: a perfect
    model lies on the dashed line.
    """
    for over in ("ranks", "clients"):
        if len({getattr(point, over) for point in one.points}) > 1:
            yield _over(one, over)
    points = []
    for point in one.points:
        measured, predicted = 1e3 * point.seconds, 1e3 * one.model(point)
        size = size_text(point.clients, point.ranks)
        points.append(ScatterPoint(measured, predicted, size))
    x = Axis(f"measured, {MS_PER_ROUND}", log=True)
    y = Axis(f"model, {MS_PER_ROUND}", log=True)
    title = f"{label(one.key)}: model against measured"
    yield scatter(title, points, x, y, diagonal="as measured")


def _over(one: Fitted, over: str) -> Drawing:
    """Draw measured and predicted times over ranks or clients: a line for each number
    of the other, up to sizes that were not measured.
    """
    by_ranks = over == "ranks"
    other_size = attrgetter("clients" if by_ranks else "ranks", "columns")
    alike: dict[tuple[float, float], list[Measured]] = grouped(one.points, other_size)
    drawn: list[Line] = []
    # The largest sizes matter most.
    for (other, _), members in sorted(alike.items(), reverse=True)[:MOST_SIZES]:
        ordered = sorted(members, key=lambda point: getattr(point, over))
        sizes = [float(getattr(point, over)) for point in ordered]
        larger = [times * sizes[-1] for times in NEXT[1:]]
        name = f"{other:,.0f} clients" if by_ranks else count(int(other), "rank")
        points = list(ordered)
        if by_ranks:
            # Every rank must have a client.
            larger = [ranks for ranks in larger if ranks <= other]
            points += [replace(ordered[-1], ranks=int(ranks)) for ranks in larger]
        else:
            points += [_with_clients(ordered, clients) for clients in larger]
        predicted = [1e3 * one.model(point) for point in points]
        drawn.append(Line(name, sizes, [1e3 * point.seconds for point in ordered]))
        drawn.append(Line(f"model, {name}", [*sizes, *larger], predicted, ideal=True))
    axis = "ranks" if by_ranks else "clients that take part"
    x = Axis(axis, log=True, ticks=ticks(drawn))
    title = f"{label(one.key)}: model over {over}"
    return lines(title, drawn, x, Axis(MS_PER_ROUND, log=True))


def _with_clients(measured: Sequence[Measured], clients: float) -> Measured:
    """Return the largest point with more clients.

    If clients share a data set, more of them have fewer steps each. So extrapolate the
    steps by their trend from the fewest to the most clients.
    """
    largest = measured[-1]
    fall = slope(
        [point.clients for point in measured], [point.steps for point in measured]
    )
    steps = largest.steps
    if not isnan(fall):  # there were several numbers of clients
        steps = max(1.0, steps * (clients / largest.clients) ** fall)
    return replace(largest, clients=clients, steps=steps)


def _checks(models: Sequence[Fitted]) -> Table:
    rows: list[Row] = []
    for one in models:
        held_out, size = nan, DASH
        if one.held_out is not None:
            # The hardest test: it predicts beyond all points used in the fit.
            held_out = one.held_out.error
            size = size_text(one.held_out.point.clients, one.held_out.point.ranks)
        errors = [PER_CENT_OF(one.model.error), PER_CENT_OF(one.model.left_out_error)]
        points = COUNT(len(one.points))
        rows.append([label(one.key), points, *errors, SIGNED_PER_CENT(held_out), size])
    columns = ("options", "points", "on points it was fitted to", "on points left out",
               "on the largest, from all smaller", "which is")  # fmt: skip
    return Table(columns, rows, "errors, %")


def _predictions(models: Sequence[Fitted]) -> Table:
    """Predict the largest number of clients on more ranks, as long as every rank has a
    client.
    """
    rows: list[Row] = []
    for one in models:
        # The most clients and the most ranks may belong to different points.
        largest = max(one.points, key=lambda point: (point.clients, point.ranks))
        most = max(point.ranks for point in one.points)
        for times in NEXT:
            ranks = times * most
            if ranks <= largest.clients:
                seconds = one.model(replace(largest, ranks=ranks))
                size = size_text(largest.clients, ranks)
                rows.append([label(one.key), size, MS(seconds)])
    return Table(("options", "predicted", MS_PER_ROUND), rows)
