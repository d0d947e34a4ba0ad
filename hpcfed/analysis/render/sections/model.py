"""Cost model: its terms, its errors, and what it predicts for larger sizes."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isnan

from hpcfed.analysis.costmodel import TERMS, Fitted, Measured
from hpcfed.analysis.findings import Table
from hpcfed.analysis.labels import label
from hpcfed.analysis.render.charts import Axis, Drawing, Line, Point, lines, scatter
from hpcfed.analysis.render.sections.section import Section, ticks
from hpcfed.analysis.scaling import slope
from hpcfed.errors import count
from hpcfed.results.pace import MS_PER_ROUND
from hpcfed.words import number

MOST_MODELS = 2
"""Models that have charts; the tables have all of them."""
MOST_SIZES = 4
"""Lines of measured points in one chart."""
NEXT = (1, 2, 4)
"""How many times the largest measured size is predicted."""


def cost_model(models: Sequence[Fitted]) -> Section:
    section = Section("model", "Cost model")
    if not models:
        return section
    section.text.append(
        "Seconds per round as a sum of costs, fitted to the points above. Errors are "
        "relative to the time. Far away from what was measured the model predicts "
        "less well: it knows nothing of a machine's other limits."
    )
    # Those that have seen most first.
    ordered = sorted(models, key=lambda one: -len(one.points))
    for one in ordered[:MOST_MODELS]:
        section.charts += _charts(one)
    if len(models) > MOST_MODELS:
        section.text.append(
            f"Charts show the {MOST_MODELS} models that were fitted to most points."
        )
    section.tables.append(_terms(models))
    section.tables.append(_checks(models))
    section.tables.append(_predictions(models))
    return section


def _charts(one: Fitted) -> Iterator[Drawing]:
    """Draw the model over ranks or clients, and against the measured times."""
    if len({point.ranks for point in one.points}) > 1:
        yield _over_ranks(one)
    if len({point.clients for point in one.points}) > 1:
        yield _over_clients(one)
    yield _against_measured(one)


def _over_ranks(one: Fitted) -> Drawing:
    alike: dict[tuple[float, float], list[Measured]] = defaultdict(list)
    for point in one.points:
        alike[point.clients, point.columns].append(point)
    drawn: list[Line] = []
    # The largest sizes are those that matter.
    for (clients, _), members in sorted(alike.items(), reverse=True)[:MOST_SIZES]:
        ordered = sorted(members, key=lambda point: point.ranks)
        most = ordered[-1]
        # Every rank must have a client.
        larger = [n * most.ranks for n in NEXT[1:] if n * most.ranks <= clients]
        sizes = [point.ranks for point in ordered]
        predicted = [1e3 * one.model(point) for point in ordered]
        for ranks in larger:
            predicted.append(1e3 * one.model(replace(most, ranks=ranks)))
        name = f"{clients:,.0f} clients"
        drawn.append(_measured(name, [float(ranks) for ranks in sizes], ordered))
        everywhere = [float(ranks) for ranks in (*sizes, *larger)]
        drawn.append(Line(f"model, {name}", everywhere, predicted, ideal=True))
    x = Axis("ranks", log=True, ticks=ticks(drawn))
    title = f"{label(one.key)}: model over ranks"
    return lines(title, drawn, x, Axis(MS_PER_ROUND, log=True))


def _over_clients(one: Fitted) -> Drawing:
    alike: dict[tuple[int, float], list[Measured]] = defaultdict(list)
    for point in one.points:
        alike[point.ranks, point.columns].append(point)
    drawn: list[Line] = []
    for (ranks, _), members in sorted(alike.items(), reverse=True)[:MOST_SIZES]:
        ordered = sorted(members, key=lambda point: point.clients)
        sizes = [point.clients for point in ordered]
        predicted = [1e3 * one.model(point) for point in ordered]
        larger = [times * sizes[-1] for times in NEXT[1:]]
        for clients in larger:
            predicted.append(1e3 * one.model(_with_clients(ordered, clients)))
        name = count(ranks, "rank")
        drawn.append(_measured(name, sizes, ordered))
        drawn.append(Line(f"model, {name}", [*sizes, *larger], predicted, ideal=True))
    x = Axis("clients that take part", log=True, ticks=ticks(drawn))
    title = f"{label(one.key)}: model over clients"
    return lines(title, drawn, x, Axis(MS_PER_ROUND, log=True))


def _with_clients(measured: Sequence[Measured], clients: float) -> Measured:
    """Return the largest point with more clients.

    Clients that share a data set have fewer steps each, the more they are: steps go on
    as they went from the fewest to the most clients.
    """
    largest = measured[-1]
    fall = slope(
        [point.clients for point in measured], [point.steps for point in measured]
    )
    steps = largest.steps
    if not isnan(fall):  # there were several numbers of clients
        steps = max(1.0, steps * (clients / largest.clients) ** fall)
    return replace(largest, clients=clients, steps=steps)


def _measured(name: str, x: Sequence[float], points: Sequence[Measured]) -> Line:
    return Line(name, x, [1e3 * point.seconds for point in points])


def _against_measured(one: Fitted) -> Drawing:
    """Draw predictions over measurements: a perfect model lies on the dashed line."""
    points = []
    for point in one.points:
        measured = 1e3 * point.seconds
        predicted = 1e3 * one.model(point)
        points.append(Point(measured, predicted, _size(point.clients, point.ranks)))
    x = Axis(f"measured, {MS_PER_ROUND}", log=True)
    y = Axis(f"model, {MS_PER_ROUND}", log=True)
    title = f"{label(one.key)}: model against measured"
    return scatter(title, points, x, y, diagonal="as measured")


def _terms(models: Sequence[Fitted]) -> Table:
    """Return the coefficients of all models, a column for each term that one has."""
    used = [
        name for name in TERMS if any(name in one.model.coefficients for one in models)
    ]
    rows = []
    for one in models:
        cells = [label(one.key)]
        for name in used:
            # In milliseconds, as all times of a round on the page.
            value = one.model.coefficients.get(name)
            cells.append("–" if value is None else number(1e3 * value))
        rows.append(cells)
    return Table(("options", *used), rows, "coefficients, ms")


def _checks(models: Sequence[Fitted]) -> Table:
    rows = []
    for one in models:
        cells = [label(one.key), str(len(one.points)), number(100 * one.model.error)]
        cells.append(number(100 * one.model.left_out_error))
        # The hardest check: it predicts beyond everything that was fitted.
        if one.held_out is None:
            cells += ["–", "–"]
        else:
            point = one.held_out.point
            cells.append(f"{100 * one.held_out.error:+.3g}")
            cells.append(_size(point.clients, point.ranks))
        rows.append(cells)
    columns = ("options", "points", "on points it was fitted to", "on points left out",
               "on the largest, from all smaller", "which is")  # fmt: skip
    return Table(columns, rows, "errors, %")


def _predictions(models: Sequence[Fitted]) -> Table:
    """Predict the largest number of clients on more ranks, as long as every rank has a
    client.
    """
    rows = []
    for one in models:
        # The most clients and the most ranks may be of different points.
        largest = max(one.points, key=lambda point: (point.clients, point.ranks))
        most = max(point.ranks for point in one.points)
        for times in NEXT:
            ranks = times * most
            if ranks <= largest.clients:
                seconds = one.model(replace(largest, ranks=ranks))
                size = _size(largest.clients, ranks)
                rows.append([label(one.key), size, number(1e3 * seconds)])
    return Table(("options", "predicted", MS_PER_ROUND), rows)


def _size(clients: float, ranks: int) -> str:
    return f"{clients:,.0f} clients on {count(ranks, 'rank')}"
