"""The tables of a study, in Markdown, and its lines; for benchmarks/paper.py."""

import math
from collections.abc import Sequence
from statistics import mean, stdev

from paper_cells import Cell, Outcome, Outcomes, outcome
from paper_study import MEASURES, Study

from hpcfed.errors import count

CLOSE = 2.0
"""Points within which a baseline counts as reproduced."""


def result_line(cell: Cell, study: Study, done: Outcome) -> str:
    """Return a finished cell's accuracies, beside the paper's."""
    figure, texts = study.figure(*cell.names), []
    for row in study.rows_of(cell.names[2]):
        values = done.accuracy.get(row)
        text = _mean_text(values)
        if row != cell.names[2]:
            text = f"{row} {text}"
        if figure is not None and values is not None:
            text += f" (paper {figure:.2f}, {mean(values) - figure:+.2f})"
        texts.append(text)
    return "  ".join(texts)


def _mean_text(values: Sequence[float] | None, digits: int = 2) -> str:
    """Return the mean over seeds and its standard error."""
    if values is None:
        return "–"
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "never"
    text = f"{mean(known):.{digits}f}"
    if len(known) > 1:
        text += f" ± {stdev(known) / math.sqrt(len(known)):.{digits}f}"
    if len(known) < len(values):
        text += f", {len(known)} of {count(len(values), 'seed')}"
    return text


def _entry(
    values: Sequence[float] | None, figure: float | None, digits: int = 2
) -> str:
    """Return our mean with the paper's figure behind it."""
    text = _mean_text(values, digits)
    return text if figure is None else f"{text} ({figure:.{digits}f})"


def print_tables(cells: Sequence[Cell], study: Study) -> None:
    """Print the tables of all finished cells, and how near they are to the paper."""
    done = {}
    for cell in cells:
        found = outcome(cell, study)
        if found is not None:
            done[cell.names] = found
    if not done:
        print("no cell is finished")
        return
    asked = list(dict.fromkeys(cell.names[2] for cell in cells))
    for measure in study.measures:
        _print_measure(measure, asked, done, study)
    _print_ablation(done, study)
    devices = ", ".join(sorted({found.device for found in done.values()}))
    seconds = sum(found.seconds for found in done.values())
    print(f"\n{count(len(done), 'cell')} in {seconds:.0f} s on {devices}")
    _print_verdict(done, study)


def _print_ablation(done: Outcomes, study: Study) -> None:
    ablation = study.ablation
    table = [[f"{ablation.method}, {ablation.clients} clients", *ablation.finals]]
    for dataset in study.datasets:
        found = done.get((dataset, ablation.clients, ablation.method))
        if found is None:
            continue
        line, figures = [dataset], ablation.figures.get(dataset, {})
        for name in ablation.finals:
            line.append(_entry(found.accuracy.get(name), figures.get(name)))
        table.append(line)
    if len(table) > 1:
        _print_table(table)


def _print_measure(
    measure: str, asked: Sequence[str], done: Outcomes, study: Study
) -> None:
    """Print a table of one measure. For the first measure, finals may stand for a
    method.
    """
    columns = dict.fromkeys((dataset, column) for dataset, column, _ in done)
    title, _, digits = MEASURES[measure]
    # Several tables need a title each.
    corner = "method" if len(study.measures) == 1 else title
    table = [[corner, *map(", ".join, columns)]]
    first = measure == study.measures[0]
    for method in asked:
        # Finals belong to the first measure.
        for row in study.rows_of(method) if first else (method,):
            line = [row]
            for column in columns:
                found, values = done.get((*column, method)), None
                if found is not None and first:
                    values = found.accuracy.get(row)
                elif found is not None:
                    values = found.further[measure]
                figure = study.figure(*column, method, measure=measure)
                line.append(_entry(values, figure, digits))
            table.append(line)
    _print_table(table)


def _print_table(table: Sequence[Sequence[str]]) -> None:
    print()
    for line in (table[0], ["---", *["---:"] * (len(table[0]) - 1)], *table[1:]):
        print(f"| {' | '.join(line)} |")


def _print_verdict(done: Outcomes, study: Study) -> None:
    """Print how near the baselines are to the paper's, and whether the paper's methods
    are ahead here too.
    """
    gaps = []
    for names, found in done.items():
        figure = study.figure(*names)
        if names[2] in study.ours or figure is None:
            continue
        for row in study.rows_of(names[2]):
            if row in found.accuracy:
                gaps.append(abs(mean(found.accuracy[row]) - figure))
    if gaps:
        close = sum(gap <= CLOSE for gap in gaps)
        print(f"baselines within {CLOSE:g} points of the paper: {close} of {len(gaps)}")
    for method in study.ours if study.rival else ():
        for row in study.rows_of(method):
            _print_lead(method, row, done, study)


def _print_lead(method: str, row: str, done: Outcomes, study: Study) -> None:
    """Print in how many cells a row of the paper's own method is above its rival."""
    leads = []
    for (dataset, column, name), found in done.items():
        rival = done.get((dataset, column, study.rival))
        if name == method and row in found.accuracy and rival is not None:
            theirs = mean(rival.accuracy[study.rival])
            leads.append(mean(found.accuracy[row]) > theirs)
    if leads:
        cells = count(len(leads), "cell")
        print(f"{row} above {study.rival}: in {sum(leads)} of {cells}")
