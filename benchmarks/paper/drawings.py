"""The figures of a paper, drawn of our runs as SVG files.

A study's file names them in [[drawings]]. Unfinished cells are drawn as far as they have
come, and the picture says so.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from re import sub
from statistics import mean
from textwrap import wrap

import numpy as np

from benchmarks.paper.cells import Cell
from benchmarks.paper.measures import MEASURES
from benchmarks.paper.pictures import Picture, Runs, line_of
from benchmarks.paper.row_drawings import between, depths, map_of_clients
from benchmarks.paper.study import NEW_SERIES, Drawing
from hpcfed.analysis.render import charts
from hpcfed.analysis.render.chart_files import image
from hpcfed.analysis.render.charts import Axis, Line, spread
from hpcfed.errors import UserError
from hpcfed.results.run import RunRecord, mean_accuracy
from hpcfed.results.series import series_of
from hpcfed.results.stored import read_seeds

LOG_FROM = 20
"""The largest value on a horizontal axis by the smallest from which on it is
logarithmic.
"""
SCALES = {"fraction": (100.0, "%"), "bytes": (2**-30, "GiB")}
"""By a series' unit: what its values are multiplied by, and the unit people read."""
LONGEST_LABEL = 48
"""Letters that fit beside the vertical axis."""
WIDTH = 6.5
"""Inches."""
LINE = 90
"""Letters of a line over a picture."""
SHARED = {
    "curves": 2,
    "bars": 2,
    "across": 1,
    "clients": 3,
    "map": 3,
    "between": 3,
    "depths": 3,
}
"""By kind of drawing, how many names (data set, column, method) the cells of one picture
have in common.
"""


def draw(cells: Sequence[Cell], folder: Path) -> None:
    """Draw the figures of the cells' studies into a folder, and print the names of the
    files; say which figures no run has anything for.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--figures {folder}: {error.strerror}") from None
    by_study: dict[tuple[str, Path], list[Cell]] = {}
    for cell in cells:
        by_study.setdefault((cell.words[0], cell.folder.parents[2]), []).append(cell)
    for (_, place), of_study in by_study.items():
        # Studies of a plan may draw the same figure, each into a folder of its own.
        there = folder / place.name if len(by_study) > 1 else folder
        there.mkdir(exist_ok=True)
        for drawing in of_study[0].study.drawings:
            pictures = _groups(drawing, of_study)
            drawn = [_draw_one(drawing, runs, there) for runs in pictures]
            if not any(drawn):
                print(f"{drawing.name}: no run has what it shows")


def _groups(drawing: Drawing, cells: Sequence[Cell]) -> Iterator[list[Runs]]:
    """Yield the runs of every picture of a figure, in the order of its methods."""
    groups: dict[tuple[str, ...], list[Runs]] = {}
    for cell in cells:
        if not drawing.shows(cell.names):
            continue
        records = []
        for record in read_seeds(cell.folder):
            if record.rounds_done and record.facts["seed"] in cell.seeds:
                records.append(record)
        # Seeds have axes of their own: a map is of the first, as is what lies between.
        if drawing.kind in ("map", "between"):
            records = records[:1]
        if records:
            key = cell.names[: SHARED[drawing.kind]]
            groups.setdefault(key, []).append(Runs(cell, records))
    order = {method: number for number, method in enumerate(drawing.methods)}
    for runs in groups.values():
        yield sorted(runs, key=lambda one: order.get(one.method, 0))


def _draw_one(drawing: Drawing, runs: Sequence[Runs], folder: Path) -> bool:
    """Draw one picture; tell whether there was anything to draw."""
    picture = KINDS[drawing.kind](drawing, runs)
    if picture is None:
        return False
    cell = runs[0].cell
    names = cell.names[: SHARED[drawing.kind]]
    title = f"{drawing.name}: {picture.subject}, {', '.join(names)}"
    words = "-".join([drawing.name, *names]).lower()
    path = folder / f"{sub(r'[^a-z0-9]+', '-', words).strip('-')}.svg"
    notes = [_sample(runs)]
    if cell.study.reading:
        notes.append(cell.study.reading)
    lines = [line for note in notes for line in wrap(note, LINE)]
    content = image(picture.drawing, "svg", inches=WIDTH, title=title, notes=lines)
    path.write_bytes(content)
    print(path, flush=True)
    return True


def _sample(runs: Sequence[Runs]) -> str:
    """Say how many seeds and rounds a picture is of."""
    seeds = [len(records) for _, records in runs]
    rounds = [record.rounds_done for _, records in runs for record in records]
    text = f"{_range(seeds)} {'seed' if max(seeds) == 1 else 'seeds'}"
    if max(seeds) > 1:
        text += " (mean, standard error)"
    text += f", {_range(rounds)} rounds"
    begun = [one.method for one in runs if _unfinished(one)]
    if begun:
        text += f"; unfinished: {', '.join(dict.fromkeys(begun))}"
    return text


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _unfinished(runs: Runs) -> bool:
    return any(record.status != "complete" for record in runs.records)


def curves(drawing: Drawing, runs: Sequence[Runs]) -> Picture | None:
    """Draw a series over rounds, a line for every method."""
    factor, unit, meaning = _series_scale(drawing.series)
    lines = []
    for one in runs:
        rows = [_series(record, drawing.series) for record in one.records]
        shortest = min(map(len, rows))
        values = factor * np.array([row[:shortest] for row in rows])
        if drawing.cumulative:
            values = np.nancumsum(values, axis=1)
        line = line_of(one.method, np.arange(1, shortest + 1), values)
        if line.x:
            lines.append(line)
    if not lines:
        return None
    subject = drawing.label or meaning
    rounds = "rounds of new clients" if drawing.series in NEW_SERIES else "rounds"
    x = Axis(rounds, whole=True)
    # A long label would not fit beside the axis: the title has it anyway.
    label = f"{subject}, {unit}"
    y = Axis(label if len(label) <= LONGEST_LABEL else unit)
    return Picture(charts.lines(subject, lines, x, y), subject)


def _series_scale(name: str) -> tuple[float, str, str]:
    """Return what a series is multiplied by, its unit then, and its meaning."""
    if name in NEW_SERIES:
        return (*SCALES["fraction"], NEW_SERIES[name])
    series = series_of(name)
    factor, unit = SCALES.get(series.unit, (1.0, series.unit))
    return factor, unit, series.meaning


def _series(record: RunRecord, name: str) -> np.ndarray:
    """Return a run's series of rounds; empty where it has none."""
    if name == "newcomers":
        updates = record.newcomers.get("method", np.empty((0, 0)))
        return np.array([mean_accuracy(update) for update in updates])
    if name in NEW_SERIES:
        if record.new_rounds is None:
            return np.empty(0)
        return record.new_rounds.curve(name.removeprefix("new_"))
    return record.rounds.get(name, np.empty(0))


def bars(drawing: Drawing, runs: Sequence[Runs]) -> Picture | None:
    """Draw a measure, a bar for every method; none for one that never got there."""
    assert drawing.measure is not None
    measure = MEASURES[drawing.measure]
    names, heights = [], []
    for one in runs:
        values = measure.of_all(one.records)
        known = [value for value in values if not math.isnan(value)]
        why = "unknown" if measure.unknown_of(one.records) else "never"
        names.append(one.method if known else f"{one.method}: {why}")
        heights.append(mean(known) if known else 0.0)
    if not any(heights):
        return None
    label = drawing.label or measure.title
    drawn = charts.bars(label, names, {label: heights}, Axis(label), "method")
    return Picture(drawn, label)


def across(drawing: Drawing, runs: Sequence[Runs]) -> Picture | None:
    """Draw a measure over an option that columns set, a line for every method; and the
    paper's figures beside, where it prints some.
    """
    assert drawing.measure is not None
    measure, study = MEASURES[drawing.measure], runs[0].cell.study
    lines = []
    for method in dict.fromkeys(one.method for one in runs):
        ours, papers = [], []
        for one in runs:
            if one.method != method:
                continue
            x = float(one.records[0].config[drawing.x])
            ours.append((x, measure.of_all(one.records)))
            figure = study.figure(*one.cell.names, measure=drawing.measure)
            if figure is not None:
                papers.append((x, [figure.value]))
        for name, points in ((method, ours), (f"{method} (paper)", papers)):
            line = _points(name, points)
            if line.x:
                lines.append(line)
    if not lines:
        return None
    label = drawing.label or measure.title
    values = [x for line in lines for x in line.x]
    x_axis = Axis(drawing.x.replace("_", " "), log=spread(values) >= LOG_FROM)
    return Picture(charts.lines(label, lines, x_axis, Axis(label)), label)


def _points(name: str, points: Sequence[tuple[float, list[float]]]) -> Line:
    """Return a line through points, each with the values of its seeds."""
    ordered = sorted(points)
    widest = max((len(values) for _, values in ordered), default=0)
    table = np.full((widest, len(ordered)), np.nan)
    for column, (_, values) in enumerate(ordered):
        table[: len(values), column] = values
    return line_of(name, [x for x, _ in ordered], table)


def clients(drawing: Drawing, runs: Sequence[Runs]) -> Picture | None:
    """Draw every client's accuracy at the end, a line for every final."""
    ((_, records),) = runs
    lines = []
    for final in drawing.finals:
        rows = [record.finals[final] for record in records if final in record.finals]
        if rows:
            numbers = np.arange(1, len(rows[0]) + 1)
            per_cent = 100 * np.array(rows)
            name = final
            if drawing.below is not None:
                few = int((per_cent < drawing.below).sum())
                of_all = int((~np.isnan(per_cent)).sum())
                name += f" ({few} of {of_all} below {drawing.below:g} %)"
            lines.append(line_of(name, numbers, per_cent))
    if not lines:
        return None
    subject = drawing.label or "accuracy of every client at the end"
    x = Axis("client", whole=True)
    return Picture(charts.lines(subject, lines, x, Axis("accuracy, %")), subject)


KINDS: dict[str, Callable[[Drawing, Sequence[Runs]], Picture | None]] = {
    "curves": curves,
    "bars": bars,
    "across": across,
    "clients": clients,
    "map": map_of_clients,
    "between": between,
    "depths": depths,
}
"""What draws each kind."""
