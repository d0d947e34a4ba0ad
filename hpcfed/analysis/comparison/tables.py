"""A comparison in tables: terminal, page and JSON show the same rows."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console

from hpcfed.analysis.comparison.comparison import Comparison
from hpcfed.analysis.comparison.points import Figure, PointPair
from hpcfed.analysis.comparison.texts import (
    both,
    changed,
    cut,
    group_name,
    verdict,
    verdicts,
    when,
)
from hpcfed.analysis.findings import Cell, Kind, Row, Table
from hpcfed.analysis.labels import label
from hpcfed.analysis.render.console import rendered, say
from hpcfed.errors import count
from hpcfed.words import DASH, MINUS, formatted, number, ratio, signed

LEAST_SHARE = 0.01
"""Phases below this share of a round's time are left out of tables."""
MOST_ROWS = 20
"""Most points or changes to print; the page has all of them."""
RATIO = Kind("1", ratio)


def change_table(comparison: Comparison) -> Table:
    """Return the options that changed, then code and machine."""
    rows = []
    for change in (*comparison.options, *comparison.code):
        rows.append([change.name, change.before, change.after, change.default])
    return Table(("changed", "A", "B", "default"), rows, words=True)


def cost_table(comparison: Comparison) -> Table:
    """Return the costs of a round, with the seconds also by phase."""
    rows = [_figure_row(figure) for figure in shown_costs(comparison)]
    return Table(("costs", "A", "B", "B / A", "verdict", "interval over"), rows)


def shown_costs(comparison: Comparison) -> list[Figure]:
    """Return all costs, with the phases that take a noticeable share of a round."""
    seconds, *others = comparison.costs
    least = LEAST_SHARE * max(seconds.before, seconds.after)
    phases = comparison.phases
    long = [phase for phase in phases if max(phase.before, phase.after) >= least]
    return [seconds, *long, *others]


def headline_table(comparison: Comparison) -> Table:
    """Return accuracies, or the task's main metric."""
    rows = [_figure_row(figure) for figure in comparison.headlines]
    columns = (when(comparison.points), "A", "B", f"B {MINUS} A", "verdict")
    return Table((*columns, "interval over"), rows)


def _figure_row(figure: Figure) -> Row:
    unit = f", {figure.unit}" if figure.unit else ""
    basis = figure.found.basis if figure.change.bounded else DASH
    write = formatted(".2f") if figure.unit == "%" else number
    side = Kind(figure.unit or "1", write)
    return [
        f"{figure.name}{unit}",
        side(figure.before),
        side(figure.after),
        _change_cell(figure),
        verdict(figure),
        basis,
    ]


def _change_cell(figure: Figure | None) -> str | Cell:
    if figure is None:
        return DASH
    kind = RATIO if figure.neutral else Kind(figure.unit or "1", signed)
    return kind(figure.change)


def point_table(comparison: Comparison) -> Table:
    """Return a row for each point, if there are several. Memory and bytes have columns
    if they differ at a point.
    """
    points = comparison.points
    costs = {
        "memory, B / A": [point.memory for point in points],
        "bytes, B / A": [point.sent for point in points],
    }
    shown = {name: of for name, of in costs.items() if any(map(_differs, of))}
    metrics = [figure.name for figure in comparison.headlines]
    columns = ["point", "clients", "ranks", "A, ms", "B, ms", "B / A", "verdict"]
    columns += shown
    for name in metrics:
        whose = name.partition(",")[0]
        columns.append(f"{whose}, B {MINUS} A")
    rows: list[Row] = []
    for place, point in enumerate(points):
        judged = {figure.name: figure for figure in point.headlines}
        more = [of[place] for of in shown.values()]
        more += [judged.get(name) for name in metrics]
        rows.append([*_point_row(point), *map(_change_cell, more)])
    return Table(columns, rows, "every point")


def _differs(figure: Figure | None) -> bool:
    return figure is not None and figure.told_apart


def _point_row(point: PointPair) -> Row:
    seconds = point.seconds
    side = Kind(seconds.unit, number)
    return [
        label(point.key) or DASH,
        both(point.before.clients, point.after.clients),
        both(point.before.ranks, point.after.ranks),
        side(seconds.before),
        side(seconds.after),
        _change_cell(seconds),
        verdict(seconds),
    ]


def tables(comparison: Comparison) -> list[Table]:
    """Return all tables that have rows, in order."""
    every = [cost_table(comparison), headline_table(comparison)]
    if len(comparison.points) > 1:
        together = [replace(table, caption="all points together") for table in every]
        every = [point_table(comparison), *together]
    return [table for table in (change_table(comparison), *every) if table.rows]


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print what changed, how the figures differ, and the verdicts."""
    for side, name in zip("AB", comparison.names, strict=True):
        say(console, f"{side}  {name}")
    for table in tables(comparison):
        console.print()
        rows = [[cut(str(cell)) for cell in row] for row in table.rows[:MOST_ROWS]]
        console.print(rendered(replace(table, rows=rows, words=False)))
        hidden = len(table.rows) - MOST_ROWS
        if hidden > 0:
            say(console, f"… and {count(hidden, 'row')} more on the page")
    # The first table lists what changed.
    nothing = [] if change_table(comparison).rows else [changed(comparison)]
    say(console, "", *nothing, *verdicts(comparison))


def exported(comparison: Comparison) -> dict[str, Any]:
    """Return the page's statements about A and B as plain values."""
    before, after = comparison.names
    return {
        "a": before,
        "b": after,
        "verdicts": [changed(comparison), *verdicts(comparison)],
        "options": [asdict(change) for change in comparison.options],
        "code": [asdict(change) for change in comparison.code],
        "costs": _figures(comparison.costs),
        "phases": _figures(comparison.phases),
        "judged": _figures(comparison.headlines),
        "points": [_point(point) for point in comparison.points],
        "only_in_a": [group_name(group) for group in comparison.only_before],
        "only_in_b": [group_name(group) for group in comparison.only_after],
    }


def _figures(figures: Sequence[Figure]) -> list[dict[str, Any]]:
    found = []
    for figure in figures:
        found.append(
            {
                "name": figure.name,
                "unit": figure.unit,
                "a": figure.before,
                "b": figure.after,
                # B / A, or B − A.
                "kind": "ratio" if figure.neutral else "difference",
                "change": asdict(figure.change),
                "verdict": verdict(figure),
                "interval_over": figure.found.basis,
            }
        )
    return found


def _point(point: PointPair) -> dict[str, Any]:
    return {
        "options": dict(point.key),
        "clients": [point.before.clients, point.after.clients],
        "ranks": [point.before.ranks, point.after.ranks],
        "costs": _figures(point.costs),
        "judged": _figures(point.headlines),
    }
