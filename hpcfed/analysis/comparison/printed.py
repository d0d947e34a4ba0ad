"""A comparison on the terminal."""

from rich.console import Console

from hpcfed.analysis.comparison.comparison import Comparison
from hpcfed.analysis.comparison.texts import (
    Cells,
    change_cells,
    changed,
    cost_cells,
    cut,
    headline_cells,
    point_cells,
    verdicts,
)
from hpcfed.analysis.render.console import bare_table, plain_text, say
from hpcfed.errors import count

MOST_ROWS = 20
"""Points or changes that are printed; the page has all of them."""


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print what changed, how the figures differ, and what that says."""
    for side, name in zip("AB", comparison.names, strict=True):
        say(console, f"{side}  {name}")
    tables = [change_cells(comparison)]
    if len(comparison.points) > 1:
        tables.append(point_cells(comparison))
    tables += [cost_cells(comparison), headline_cells(comparison)]
    for cells in tables:
        if cells.rows:
            console.print()
            _print(cells, console)
    # What changed is in the first table.
    nothing = [] if tables[0].rows else [changed(comparison)]
    say(console, "", *nothing, *verdicts(comparison))


def _print(cells: Cells, console: Console) -> None:
    table = bare_table(*cells.columns)
    for row in cells.rows[:MOST_ROWS]:
        table.add_row(*(plain_text(cut(cell)) for cell in row))
    console.print(table)
    hidden = len(cells.rows) - MOST_ROWS
    if hidden > 0:
        say(console, f"… and {count(hidden, 'row')} more on the page")
