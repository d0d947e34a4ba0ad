"""A comparison in sentences and tables: terminal, page and JSON show the same."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console

from hpcfed.analysis.comparison.changes import Change
from hpcfed.analysis.comparison.comparison import (
    MEMORY,
    SENT,
    Comparison,
    Figure,
    PointPair,
)
from hpcfed.analysis.findings import Cell, Kind, Row, Table
from hpcfed.analysis.groups import Group
from hpcfed.analysis.labels import label, size_text
from hpcfed.analysis.render.console import rendered, say
from hpcfed.errors import count
from hpcfed.words import DASH, MINUS, formatted, interval, number, ratio, signed

LEAST_SHARE = 0.01
"""Phases below this share of a round's time are left out of tables."""
MOST_ROWS = 20
"""Most points or changes to print; the page has all of them."""
RATIO = Kind("1", ratio)
MOST_NAMED = 5
"""Most changes or points that a sentence names; more are counted."""
WIDEST = 60
"""Longest name in a sentence or on the terminal; tables of the page have all."""
NOISE = (
    "one run per side cannot tell noise from a difference; A or B may be a folder of "
    "several runs"
)
"""Added to figures that need several runs."""
ARROW = "\N{RIGHTWARDS ARROW}"


def verdicts(comparison: Comparison) -> list[str]:
    """Return how B differs from A, one sentence per question."""
    lines = _points(comparison)
    seconds, *others = comparison.costs
    lines.append(_speed(seconds, comparison.phases))
    lines += _other_costs(others)
    lines += _different_rounds(comparison.points)
    lines += [_judged(figure) for figure in comparison.headlines]
    return lines


def _different_rounds(points: Sequence[PointPair]) -> list[str]:
    """Say at which round the sides are judged, if one has learnt for longer."""
    rounds = {point.common_round for point in points} - {None}
    if not rounds:
        return _early_ends(points)
    if rounds == {0}:
        return [
            "Rounds differ, and no round was evaluated on both sides: what models have "
            "learnt is not compared."
        ]
    return [f"Rounds differ: both sides are judged {when(points)}."]


def _early_ends(points: Sequence[PointPair]) -> list[str]:
    """Say after how many rounds runs are judged that have ended at different ones."""
    sides: dict[str, set[int]] = {"A": set(), "B": set()}
    for point in points:
        before, after = (
            {run.rounds_done for run in group.seeds}
            for group in (point.before, point.after)
        )
        # As many rounds were planned on both sides.
        if len(before | after) > 1:
            sides["A"] |= before
            sides["B"] |= after
    told = []
    for side, done in sides.items():
        if done:
            least = f"{min(done)} to " if len(done) > 1 else ""
            told.append(f"{side} after {least}{count(max(done), 'round')}")
    if not told:
        return []
    return [f"Runs ended early, and are judged at their ends: {', '.join(told)}."]


def when(points: Sequence[PointPair]) -> str:
    """Return `after round 5, the last that both evaluated`, or `after the last round`."""
    rounds = {point.common_round for point in points} - {0}
    if rounds <= {None}:
        return "after the last round"
    if len(rounds) > 1:
        return "after the last round that both evaluated"
    return f"after round {rounds.pop()}, the last that both evaluated"


def changed(comparison: Comparison) -> str:
    """Say what changed in options, code and machine."""
    if not comparison.options and not comparison.code:
        return "Nothing changed in options, code or machine."
    lines = []
    for what, changes in {
        "Options": comparison.options,
        "Code and machine": comparison.code,
    }.items():
        told = _named(map(_change, changes)) if changes else "nothing changed"
        lines.append(f"{what}: {told}.")
    return " ".join(lines)


def _change(change: Change) -> str:
    texts = [cut(text) for text in (change.name, change.before, change.after)]
    return f"{texts[0]} {texts[1]} {ARROW} {texts[2]}"


def cut(text: str) -> str:
    """Shorten texts that may be long in an untrusted file."""
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 1]}…"


def _points(comparison: Comparison) -> list[str]:
    """Name the points that only one side has."""
    lines = []
    sides = {"A": comparison.only_before, "B": comparison.only_after}
    for side, groups in sides.items():
        if groups:
            names = _named(map(group_name, groups))
            lines.append(f"Only in {side}: {names}.")
    return lines


def _named(names: Iterable[str]) -> str:
    listed = list(names)
    told = "; ".join(listed[:MOST_NAMED])
    rest = len(listed) - MOST_NAMED
    return f"{told}; and {rest} more" if rest > 0 else told


def group_name(group: Group) -> str:
    """Return `fedavg, lr 0.1, 20 clients on 2 ranks`."""
    size = size_text(group.clients, group.ranks)
    return ", ".join(filter(None, (label(group.key), size)))


def point_name(point: PointPair) -> str:
    """Return `lr 0.1, 20 clients on 2 ranks`, with both numbers if they changed."""
    clients = both(point.before.clients, point.after.clients)
    ranks = both(point.before.ranks, point.after.ranks)
    return ", ".join(filter(None, (label(point.key), f"{clients} on {ranks}")))


def _speed(seconds: Figure, phases: Sequence[Figure]) -> str:
    told = f"{change_text(seconds)} A's seconds per round"
    if seconds.told_apart:
        return f"B is {_share(seconds)}: {told}{_largest(phases)}."
    if not seconds.beyond_interval:
        remark = "" if seconds.repeated else f"; {NOISE}"
        return f"Speed is not told apart: B takes {told}{remark}."
    return f"B took {told}{_largest(phases)}: {NOISE}."


def _share(figure: Figure) -> str:
    """Return `12.3 % slower`; without the percentage if it would be hard to read."""
    change = figure.change.centre
    if not 0.5 < change < 2:
        return _word(figure)
    return f"{100 * abs(change - 1):.1f} % {_word(figure)}"


def _largest(phases: Sequence[Figure]) -> str:
    """Return the phase whose time changed most; nothing if none is known, as before the
    first round on other ranks.
    """
    if not phases:
        return ""
    most = max(phases, key=lambda phase: abs(phase.after - phase.before))
    phase = most.name.removeprefix("phase ")
    return f", mostly {phase}, {number(most.before)} {ARROW} {number(most.after)} ms"


def _other_costs(figures: Sequence[Figure]) -> list[str]:
    """Say which other costs have changed, in one sentence."""
    changed = []
    for figure in figures:
        if figure.told_apart:
            changed.append(f"{figure.name}: {change_text(figure)}")
    return [f"{'; '.join(changed)}."] if changed else []


def _judged(figure: Figure) -> str:
    name = figure.name[0].upper() + figure.name[1:]
    if figure.same:
        return f"{name}: the same."
    told = change_text(figure)
    if figure.told_apart:
        return f"{name}: B is {_word(figure)}, {told} ({figure.found.basis})."
    if figure.change.bounded:
        return f"{name}: not told apart, {told} ({figure.found.basis})."
    return f"{name}: {told}; without several seeds there is no interval."


def _word(figure: Figure) -> str:
    more, less = figure.words
    return more if figure.change.centre > figure.neutral else less


def verdict(figure: Figure) -> str:
    """Return one or a few words: `slower`, `not told apart`, `same`."""
    if figure.same:
        return "same"
    if not figure.repeated:
        return "one run each"
    return _word(figure) if figure.told_apart else "not told apart"


def change_text(figure: Figure) -> str:
    """Return `1.12 [1.05, 1.19] times` or `−0.8 [−1.4, −0.2] points`."""
    # 1 for ratios, 0 for differences.
    if figure.neutral:
        return f"{interval(figure.change, write=ratio)} times"
    unit = " points" if figure.unit == "%" else ""
    return f"{interval(figure.change, write=signed)}{unit}"


def both(before: int, after: int) -> str:
    """Return `20`, or `20 → 40` if they differ."""
    return f"{before:,}" if before == after else f"{before:,} {ARROW} {after:,}"


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
    """Return a row per point; memory and bytes have columns if they differ."""
    points = comparison.points
    costs = {
        "memory, B / A": [point.ratio(MEMORY) for point in points],
        "bytes, B / A": [point.ratio(SENT) for point in points],
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
