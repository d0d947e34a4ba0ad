"""Cost model: its terms, its errors, and what it predicts for more ranks."""

from collections.abc import Sequence
from dataclasses import replace

from hpcfed.errors import count
from hpcfed.report.charts import Axis, Drawing, Point, scatter
from hpcfed.report.costmodel import TERMS, Fitted
from hpcfed.report.labels import label
from hpcfed.report.sections.section import Section, Table, number


def cost_model(models: Sequence[Fitted]) -> Section:
    section = Section("model", "Cost model")
    if not models:
        section.text.append(
            "There are too few different points to fit one: three numbers of clients "
            "or ranks, at least."
        )
        return section
    section.text.append(
        "Seconds per round as a sum of costs, fitted to the points above. Errors are "
        "relative to the time. Far away from what was measured the model predicts "
        "less well: it knows nothing of a machine's other limits."
    )
    for one in models:
        section.charts.append(_chart(one))
        section.tables.append(_terms(one))
        checks = _checks(one)
        section.tables.append(Table(("checked", "error, %"), checks))
        section.tables.append(_predictions(one))
    return section


def _chart(one: Fitted) -> Drawing:
    """Draw predictions over measurements: a perfect model lies on the dashed line."""
    points = []
    for point in one.points:
        measured = 1e3 * point.seconds
        predicted = 1e3 * one.model(point)
        points.append(Point(measured, predicted, _size(point.clients, point.ranks)))
    x = Axis("measured, ms per round", log=True)
    y = Axis("model, ms per round", log=True)
    return scatter(label(one.key), points, x, y, diagonal="as measured")


def _terms(one: Fitted) -> Table:
    rows = []
    for name, coefficient in one.model.coefficients.items():
        unit, _ = TERMS[name]
        rows.append([name, f"{coefficient:.3g} {unit}"])
    return Table(("cost", "coefficient"), rows, label(one.key))


def _checks(one: Fitted) -> list[list[str]]:
    fitted = 100 * one.model.error
    left_out = 100 * one.model.left_out_error
    rows = [
        ["mean over the points it was fitted to", number(fitted)],
        ["mean over points, each predicted by a fit of the others", number(left_out)],
    ]
    # The hardest check: it predicts beyond everything that was fitted.
    if one.held_out is not None:
        point = one.held_out.point
        what = _size(point.clients, point.ranks)
        rows.append([
            f"{what}, predicted by a fit of all smaller points",
            f"{100 * one.held_out.error:+.3g}",
        ])  # fmt: skip
    return rows


def _predictions(one: Fitted) -> Table:
    """Predict the largest number of clients on 1, 2, 4 and 8 times the most ranks, as
    long as every rank has a client.
    """
    # The most clients and the most ranks may be of different points.
    largest = max(one.points, key=lambda point: (point.clients, point.ranks))
    most = max(point.ranks for point in one.points)
    rows = []
    for times in (1, 2, 4, 8):
        ranks = times * most
        if ranks <= largest.clients:
            seconds = one.model(replace(largest, ranks=ranks))
            size = _size(largest.clients, ranks)
            rows.append([size, number(1e3 * seconds)])
    return Table(("predicted", "ms per round"), rows)


def _size(clients: float, ranks: int) -> str:
    return f"{clients:,.0f} clients on {count(ranks, 'rank')}"
