"""The tables of a study, in Markdown, and its lines."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

from benchmarks.paper.cells import Cell, Outcome, Outcomes, fits, outcome
from benchmarks.paper.entries import Entry, count_near, mean_text, near_text
from benchmarks.paper.measures import MEASURES
from benchmarks.paper.study import Printed, Study, Table
from hpcfed.errors import count


def result_line(cell: Cell, done: Outcome) -> str:
    """Return a finished cell's accuracies, beside the paper's."""
    study, method = cell.study, cell.names[2]
    measure, figure = study.measures[0], study.figure(*cell.names)
    texts = []
    for row in study.rows_of(method):
        values = _values(done, method, row, measure)
        text = mean_text(values, MEASURES[measure])
        if row != method:
            text = f"{row} {text}"
        if figure is not None and values is not None:
            difference = mean(values) - figure.value
            text += f" (paper {figure.value:.2f}, {difference:+.2f})"
        texts.append(text)
    return "  ".join(texts)


def _values(
    found: Outcome | None, method: str, row: str, measure: str
) -> list[float] | None:
    """Return a table row's values of all seeds: the method's own, or a final's."""
    if found is None:
        return None
    if row == method:
        return found.measured[measure]
    return found.finals.get(row)


def print_tables(cells: Sequence[Cell], *, unfinished: bool = False) -> None:
    """Print the tables of all finished cells, and how near they are to the paper; with
    `unfinished` of the others, too, as far as they have come.

    The cells of a plan come study by study, each with tables of its own.
    """
    # A study is one file and one folder: a plan may run its cells twice.
    groups: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        folder = str(cell.folder.parents[2])
        groups.setdefault((cell.words[0], folder), []).append(cell)
    for (path, folder), of_study in groups.items():
        if len(groups) > 1:
            print(f"\n## {path} in {folder}")
        _print_study(of_study, unfinished=unfinished)


def _print_study(cells: Sequence[Cell], *, unfinished: bool) -> None:
    study = cells[0].study
    done = {}
    for cell in cells:
        found = outcome(cell, unfinished=unfinished)
        if found is not None:
            done[cell.names] = found
    if not done:
        print("no cell is finished")
        return
    asked = [cell.names for cell in cells]
    tables = study.tables or [Table(measure=name) for name in study.measures]
    counted = []
    for table in tables:
        entries = print_measure(table, asked, done, study)
        if table.name and entries:
            counted.append((table, entries))
    _print_ablation(done, study)
    print_counts(counted, study)
    devices = ", ".join(sorted({found.device for found in done.values()}))
    seconds = sum(found.seconds for found in done.values())
    print(f"\n{count(len(done), 'cell')} in {seconds:.0f} s on {devices}")
    _print_verdict(done, study)


def _print_ablation(done: Outcomes, study: Study) -> None:
    ablation = study.ablation
    head = [f"{ablation.method}, {ablation.clients} clients", *ablation.finals]
    rows: list[tuple[str, list[Entry]]] = []
    for dataset in study.datasets:
        found = done.get((dataset, ablation.clients, ablation.method))
        if found is None:
            continue
        figures = ablation.figures.get(dataset, {})
        entries = []
        for name in ablation.finals:
            values = found.finals.get(name)
            figure = figures.get(name)
            # Finals are accuracies.
            entries.append(Entry(values, figure, MEASURES["accuracy"]))
        rows.append((dataset, entries))
    if rows:
        _print_table(head, rows)


def print_measure(
    table: Table, asked: Sequence[tuple[str, str, str]], done: Outcomes, study: Study
) -> list[Entry]:
    """Print one table; return its entries that can be held against the paper. For the
    study's first measure, finals may stand for a method.
    """
    shown = [names for names in asked if table.shows(names)]
    columns = _columns(table, done)
    if not columns:
        return []
    measures = (table.measure, *table.beside)
    titles = [MEASURES[measure].title for measure in measures]
    # Several tables need a title each.
    corner = "method" if len(study.all_measures) == 1 else titles[0]
    headings = [", ".join(column) for column in columns]
    if table.name:
        common, headings = _shortened(columns)
        about = ", ".join(["; beside it ".join(titles), *common])
        if table.minus:
            about += f"; less that of {table.minus}, seed by seed"
        print(f"\n**{table.name}**: {about}")
        corner = "method"
    if table.beside:
        pairs = itertools.product(headings, measures)
        headings = [f"{heading}: {measure}" for heading, measure in pairs]
    rows, main = [], []
    for method in _in_order(table.methods, [names[2] for names in shown]):
        # Finals belong to the first measure.
        first = table.measure == study.measures[0]
        for row in study.rows_of(method) if first else (method,):
            line = _entries(table.measure, columns, method, row, done, study)
            if table.minus:
                less = _entries(
                    table.measure, columns, table.minus, table.minus, done, study
                )
                line = [_less(*pair) for pair in zip(line, less, strict=True)]
            main += [entry for entry in line if entry.counts]
            lines = [line]
            for beside in table.beside:
                lines.append(_entries(beside, columns, method, method, done, study))
            by_column = zip(*lines, strict=True)
            rows.append((row, list(itertools.chain.from_iterable(by_column))))
    _print_table([corner, *headings], rows)
    return main


def _less(entry: Entry, other: Entry) -> Entry:
    """Return what an entry is above another, seed by seed; nothing where they have
    different seeds or rounds.
    """
    values = None
    same = (entry.seeds, entry.stopped_at) == (other.seeds, other.stopped_at)
    comparable = same and not entry.unknown and not other.unknown
    if comparable and entry.values is not None and other.values is not None:
        pairs = zip(entry.values, other.values, strict=True)
        values = [ours - theirs for ours, theirs in pairs]
    figure = None
    if entry.figure is not None and other.figure is not None:
        figure = Printed(entry.figure.value - other.figure.value)
    return replace(entry, values=values, figure=figure, paired=True)


Column = tuple[str, str]
"""A data set, and a column of the study."""


def _columns(table: Table, done: Outcomes) -> list[Column]:
    """Return the columns of a table that have a result, in the table's order."""
    found = dict.fromkeys(names[:2] for names in done if table.shows(names))
    datasets = _in_order(table.datasets, [dataset for dataset, _ in found])
    columns = _in_order(table.columns, [column for _, column in found])
    ordered = itertools.product(datasets, columns)
    return [column for column in ordered if column in found]


def _in_order(wanted: Sequence[str], there: Sequence[str]) -> list[str]:
    """Return the names that are there, each once, in the order that is wanted; in their
    own where none is.
    """
    return [name for name in wanted or dict.fromkeys(there) if name in there]


def _shortened(columns: Sequence[Column]) -> tuple[list[str], list[str]]:
    """Return what all columns have in common, and the headings without it."""
    datasets, names = zip(*columns, strict=True)
    if len(set(datasets)) == 1:
        return [datasets[0]], list(names)
    if len(set(names)) == 1:
        return [names[0]], list(datasets)
    return [], [", ".join(column) for column in columns]


def _entries(
    measure: str,
    columns: Sequence[Column],
    method: str,
    row: str,
    done: Outcomes,
    study: Study,
) -> list[Entry]:
    """Return a row of a table."""
    entries = []
    for column in columns:
        found = done.get((*column, method))
        values = _values(found, method, row, measure)
        if values is not None and MEASURES[measure].relative:
            rivals = done.get((*column, study.rival))
            values = _relative(values, rivals.measured[measure] if rivals else [])
        figure = study.figure(*column, method, measure=measure)
        entry = Entry(values, figure, MEASURES[measure])
        if found is not None:
            entry = replace(
                entry,
                stopped_at=found.stopped_at,
                unknown=measure in found.unknown,
                seeds=found.seeds,
            )
        entries.append(entry)
    return entries


def _relative(values: Sequence[float], rivals: Sequence[float]) -> list[float] | None:
    """Return the values by the rival's mean; None where the rival has none."""
    known = [value for value in rivals if not math.isnan(value)]
    if not known:
        return None
    return [value / mean(known) for value in values]


def _print_table(
    head: Sequence[str], rows: Sequence[tuple[str, Sequence[Entry]]]
) -> None:
    """Print a table, and below it how many entries are near to the paper."""
    lines = [[name, *map(str, entries)] for name, entries in rows]
    print()
    for line in (head, ["---", *["---:"] * (len(head) - 1)], *lines):
        print(f"| {' | '.join(line)} |")
    counted: dict[str, list[Entry]] = {}
    for _, entries in rows:
        for entry in entries:
            if entry.counts:
                counted.setdefault(entry.measure.title, []).append(entry)
    for title, near in counted.items():
        about = f"{title}: " if len(counted) > 1 else ""
        print(f"\n{about}{near_text(near)}")


def print_counts(
    counted: Sequence[tuple[Table, Sequence[Entry]]], study: Study
) -> None:
    """Print how many figures of every table of the paper are computed, and how near
    these are to it.
    """
    if not counted:
        return
    print(
        "\n**Counted**: figures of the paper, those computed, and how near they are\n"
    )
    print("| table | figures of the paper | cells computed | within its error | near |")
    print("| --- | ---: | ---: | ---: | --- |")
    for table, entries in counted:
        found, near = count_near(entries), MEASURES[table.measure].near.text
        within = f"{found.within} of {found.with_error}" if found.with_error else "–"
        close = f"{near}: {found.near} of {len(entries)}"
        printed = _num_printed(table, study)
        print(f"| {table.name} | {printed} | {len(entries)} | {within} | {close} |")


def _num_printed(table: Table, study: Study) -> int:
    """Return how many figures the paper prints for a table's rows; columns that read
    another one anew have no figures of their own.
    """
    printed = set()
    for names in itertools.product(study.datasets, study.across, study.methods):
        dataset, column, method = names
        if not table.shows(names) or not fits("/".join(names), study.cells):
            continue
        figure = study.figure(*names, measure=table.measure)
        if table.minus and figure is not None:
            figure = study.figure(dataset, column, table.minus, measure=table.measure)
        # A method less itself is nothing.
        if figure is not None and method != table.minus:
            printed.add((dataset, study.figures_of.get(column, column), method))
    return len(printed)


def _print_verdict(done: Outcomes, study: Study) -> None:
    """Print how near the baselines are to the paper's, and whether the paper's methods
    are ahead here too; of finished cells alone.
    """
    close, near = [], MEASURES[study.measures[0]].near
    finished = {names: found for names, found in done.items() if not found.stopped_at}
    for names, found in finished.items():
        figure, method = study.figure(*names), names[2]
        if method in study.ours or figure is None:
            continue
        for row in study.rows_of(method):
            values = _values(found, method, row, study.measures[0])
            if values is not None:
                close.append(near.holds(mean(values), figure.value))
    if close:
        text = f"baselines {near.text} of the paper"
        print(f"{text}: {sum(close)} of {len(close)}")
    for method in study.ours if study.rival else ():
        for row in study.rows_of(method):
            _print_lead(method, row, finished, study)


def _print_lead(method: str, row: str, done: Outcomes, study: Study) -> None:
    """Print in how many cells a row of the paper's own method is above its rival."""
    leads, measure = [], study.measures[0]
    for (dataset, column, name), found in done.items():
        rival = done.get((dataset, column, study.rival))
        values = _values(found, method, row, measure)
        if name == method and values is not None and rival is not None:
            leads.append(mean(values) > mean(rival.measured[measure]))
    if leads:
        cells = count(len(leads), "cell")
        print(f"{row} above {study.rival}: in {sum(leads)} of {cells}")
