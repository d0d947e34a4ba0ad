"""Comparison of two paths, A and B: what changed, and what it did."""

from hpcfed.report.comparison import Comparison
from hpcfed.report.comparison.texts import (
    Cells,
    change_cells,
    cost_cells,
    headline_cells,
    point_cells,
    verdicts,
)
from hpcfed.report.sections.section import Section, Table


def comparison(compared: Comparison) -> Section:
    section = Section("comparison", "B compared with A")
    for side, name in zip("AB", compared.names, strict=True):
        section.text.append(f"{side}: {name}")
    section.text += verdicts(compared)
    changes = change_cells(compared)
    if changes.rows:
        section.tables.append(_table(changes, words=True))
    if len(compared.points) > 1:
        section.tables.append(_table(point_cells(compared)))
    section.tables.append(_table(cost_cells(compared)))
    section.tables.append(_table(headline_cells(compared)))
    return section


def _table(cells: Cells, *, words: bool = False) -> Table:
    return Table(cells.columns, cells.rows, words=words)
