"""The tables of a study, in Markdown, and its lines; for benchmarks/paper.py."""

import math
from collections.abc import Sequence
from statistics import mean, stdev

from paper_cells import Cell, Outcome, Outcomes, outcome
from paper_study import MEASURES, Study

from hpcfed.errors import count

CLOSE = 2.0
"""Points within which a baseline counts as reproduced."""


def texts(cell: Cell, study: Study, done: Outcome) -> str:
    figure, texts = study.figure(*cell.names), []
    for row in study.rows_of(cell.names[2]):
        values = done.accuracy.get(row)
        label = "" if row == cell.names[2] else f"{row} "
        known = (
            ""
            if figure is None or values is None
            else f" (paper {figure:.2f}, {mean(values) - figure:+.2f})"
        )
        texts.append(f"{label}{ours(values)}{known}")
    return "  ".join(texts)


def ours(values: Sequence[float] | None, digits: int = 2) -> str:
    if values is None:
        return "–"
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "never"
    error = (
        f" ± {stdev(known) / math.sqrt(len(known)):.{digits}f}"
        if len(known) > 1
        else ""
    )
    missing = (
        ""
        if len(known) == len(values)
        else f", {len(known)} of {count(len(values), 'seed')}"
    )
    return f"{mean(known):.{digits}f}{error}{missing}"


def entry(values: Sequence[float] | None, figure: float | None, digits: int = 2) -> str:
    return ours(values, digits) + ("" if figure is None else f" ({figure:.{digits}f})")


def print_tables(cells: Sequence[Cell], study: Study) -> None:
    done = {cell.names: found for cell in cells if (found := outcome(cell, study))}
    if not done:
        print("no cell is finished")
        return
    asked = list(dict.fromkeys(cell.names[2] for cell in cells))
    for measure in study.measures:
        print_measure(measure, asked, done, study)
    own = study.ablation
    table = [[f"{own.method}, {own.clients} clients", *own.finals]]
    for dataset in study.datasets:
        if of := done.get((dataset, own.clients, own.method)):
            figures = own.figures.get(dataset, {})
            table.append(
                [
                    dataset,
                    *(
                        entry(of.accuracy.get(name), figures.get(name))
                        for name in own.finals
                    ),
                ]
            )
    if len(table) > 1:
        print_table(table)
    devices = ", ".join(sorted({of.device for of in done.values()}))
    print(
        f"\n{count(len(done), 'cell')} in "
        f"{sum(of.seconds for of in done.values()):.0f} s on {devices}"
    )
    print_verdict(done, study)


def print_measure(
    measure: str, asked: Sequence[str], done: Outcomes, study: Study
) -> None:
    """A table of what is finished; its first measure also for what stands for a method
    in its place.
    """
    columns = dict.fromkeys((dataset, column) for dataset, column, _ in done)
    title, _, digits = MEASURES[measure]
    table = [
        ["method" if len(study.measures) == 1 else title, *map(", ".join, columns)]
    ]
    first = measure == study.measures[0]
    for method in asked:
        for row in study.rows_of(method) if first else (method,):
            entries = []
            for at in columns:
                of, figure = (
                    done.get((*at, method)),
                    study.figure(*at, method, measure=measure),
                )
                values = (
                    None
                    if of is None
                    else of.accuracy.get(row)
                    if first
                    else of.further[measure]
                )
                entries.append(entry(values, figure, digits))
            table.append([row, *entries])
    print_table(table)


def print_table(table: Sequence[Sequence[str]]) -> None:
    print()
    for line in (table[0], ["---", *["---:"] * (len(table[0]) - 1)], *table[1:]):
        print(f"| {' | '.join(line)} |")


def print_verdict(done: Outcomes, study: Study) -> None:
    """How near the baselines are to the paper's, and whether the paper's method is
    ahead here too.
    """
    gaps = [
        abs(mean(of.accuracy[row]) - figure)
        for names, of in done.items()
        if names[2] not in study.ours and (figure := study.figure(*names)) is not None
        for row in study.rows_of(names[2])
        if row in of.accuracy
    ]
    if gaps:
        print(
            f"baselines within {CLOSE:g} points of the paper: "
            f"{sum(gap <= CLOSE for gap in gaps)} of {len(gaps)}"
        )
    own = [
        (method, row)
        for method in study.ours
        for row in study.rows_of(method)
        if study.rival
    ]
    for ours, row in own:
        pairs = [
            (
                mean(of.accuracy[row]),
                mean(done[dataset, clients, study.rival].accuracy[study.rival]),
            )
            for (dataset, clients, method), of in done.items()
            if method == ours
            and row in of.accuracy
            and (dataset, clients, study.rival) in done
        ]
        if pairs:
            ahead = sum(own > other for own, other in pairs)
            print(
                f"{row} above {study.rival}: in {ahead} of {count(len(pairs), 'cell')}"
            )
