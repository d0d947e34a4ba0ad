"""A comparison in words and cells, for the page and for the terminal."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpcfed.analysis.comparison.changes import Change
from hpcfed.analysis.comparison.comparison import Comparison
from hpcfed.analysis.comparison.points import Figure, PointPair
from hpcfed.analysis.groups import Group
from hpcfed.analysis.labels import label
from hpcfed.analysis.statistics import Estimate
from hpcfed.errors import count
from hpcfed.words import DASH, MINUS, interval, number, ratio, signed

MOST_NAMED = 5
"""Changes or points that a sentence names; more are counted."""
WIDEST = 60
"""Letters of a name in a sentence or on the terminal; tables of the page have all."""
LEAST_SHARE = 0.01
"""The share of a round's time below which a phase is left out of tables."""
NOISE = (
    "one run on a side cannot tell noise; a folder of several runs may stand for A or B"
)
"""Said of figures that several runs would tell better."""
ARROW = "\N{RIGHTWARDS ARROW}"


@dataclass(frozen=True)
class Cells:
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def verdicts(comparison: Comparison) -> list[str]:
    """Return how B differs from A, a sentence for each question."""
    lines = _points(comparison)
    seconds, *others = comparison.costs
    lines.append(_speed(seconds, comparison.phases))
    lines += _other_costs(others)
    lines += _different_rounds(comparison.points)
    lines += [_judged(figure) for figure in comparison.headlines]
    return lines


def _different_rounds(points: Sequence[PointPair]) -> list[str]:
    """Say when sides are judged that have not learnt for as long."""
    rounds = {point.common_round for point in points} - {None}
    if not rounds:
        return []
    if rounds == {0}:
        return [
            "Rounds differ, and no round was evaluated on both sides: what models have "
            "learnt is not compared."
        ]
    return [f"Rounds differ: both sides are judged {_when(points)}."]


def _when(points: Sequence[PointPair]) -> str:
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
    """Shorten what may be long in a file that somebody handed in."""
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
    size = f"{count(group.clients, 'client')} on {count(group.ranks, 'rank')}"
    return ", ".join(filter(None, (label(group.key), size)))


def point_name(point: PointPair) -> str:
    """Return `lr 0.1, 20 clients on 2 ranks`, with both where they changed."""
    clients = _both(point.before.clients, point.after.clients)
    ranks = _both(point.before.ranks, point.after.ranks)
    return ", ".join(filter(None, (label(point.key), f"{clients} on {ranks}")))


def _speed(seconds: Figure, phases: Sequence[Figure]) -> str:
    told = f"{ratio_text(seconds.change)} times A's seconds per round"
    if seconds.told_apart:
        return f"B is {_share(seconds)}: {told}, mostly {_largest(phases)}."
    if not seconds.beyond_interval:
        remark = "" if seconds.repeated else f"; {NOISE}"
        return f"Speed is not told apart: B takes {told}{remark}."
    return f"B took {told}, mostly {_largest(phases)}: {NOISE}."


def _share(figure: Figure) -> str:
    """Return `12.3 % slower`; without the share where it would be hard to read."""
    change = figure.change.centre
    if not 0.5 < change < 2:
        return _word(figure)
    return f"{100 * abs(change - 1):.1f} % {_word(figure)}"


def _largest(phases: Sequence[Figure]) -> str:
    """Return the phase whose time has changed most."""
    most = max(phases, key=lambda phase: abs(phase.after - phase.before))
    phase = most.name.removeprefix("phase ")
    return f"{phase}, {number(most.before)} {ARROW} {number(most.after)} ms"


def _other_costs(figures: Sequence[Figure]) -> list[str]:
    """Tell which other costs have changed, in one sentence."""
    changed = []
    for figure in figures:
        if figure.told_apart:
            changed.append(f"{figure.name}: {ratio_text(figure.change)} times")
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
    """Return one word or a few: `slower`, `not told apart`, `same`."""
    if figure.same:
        return "same"
    if not figure.repeated:
        return "one run each"
    return _word(figure) if figure.told_apart else "not told apart"


def change_text(figure: Figure) -> str:
    """Return `1.12 [1.05, 1.19] times` or `−0.8 [−1.4, −0.2] points`."""
    if figure.neutral:
        return f"{ratio_text(figure.change)} times"
    unit = " points" if figure.unit == "%" else ""
    return f"{signed_text(figure.change)}{unit}"


def ratio_text(change: Estimate) -> str:
    """Return `1.12 [1.05, 1.19]`."""
    return interval(change, write=ratio)


def signed_text(change: Estimate) -> str:
    """Return `+0.80 [−0.10, +1.70]`."""
    return interval(change, write=signed)


def _per_cent(value: float) -> str:
    return f"{value:.2f}"


def change_cells(comparison: Comparison) -> Cells:
    """Return options, then code and machine, that changed."""
    rows = []
    for change in (*comparison.options, *comparison.code):
        rows.append([change.name, change.before, change.after, change.default])
    return Cells(("changed", "A", "B", "default"), rows)


def cost_cells(comparison: Comparison) -> Cells:
    """Return the costs of a round, the seconds also by phase."""
    rows = []
    seconds, *others = comparison.costs
    rows.append(_figure_row(seconds))
    rows += [_figure_row(phase) for phase in long_phases(comparison)]
    rows += [_figure_row(figure) for figure in others]
    return Cells(("costs", "A", "B", "B / A", "verdict", "interval over"), rows)


def long_phases(comparison: Comparison) -> list[Figure]:
    """Return the phases that take more than a moment of a round."""
    seconds = comparison.costs[0]
    least = LEAST_SHARE * max(seconds.before, seconds.after)
    phases = comparison.phases
    return [phase for phase in phases if max(phase.before, phase.after) >= least]


def headline_cells(comparison: Comparison) -> Cells:
    """Return accuracies, or what the task is judged by."""
    rows = [_figure_row(figure) for figure in comparison.headlines]
    columns = (_when(comparison.points), "A", "B", f"B {MINUS} A", "verdict")
    return Cells((*columns, "interval over"), rows)


def _figure_row(figure: Figure) -> list[str]:
    unit = f", {figure.unit}" if figure.unit else ""
    change = figure.change
    told = ratio_text(change) if figure.neutral else signed_text(change)
    basis = figure.found.basis if change.bounded else DASH
    text = _per_cent if figure.unit == "%" else number
    sides = [text(figure.before), text(figure.after)]
    return [f"{figure.name}{unit}", *sides, told, verdict(figure), basis]


def point_cells(comparison: Comparison) -> Cells:
    """Return a row for every point, where there are several. Memory and bytes have
    columns where they differ at a point.
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
    rows = []
    for place, point in enumerate(points):
        row = _point_row(point)
        row += [_ratio_cell(of[place]) for of in shown.values()]
        judged = {figure.name: figure for figure in point.headlines}
        row += [_signed_cell(judged.get(name)) for name in metrics]
        rows.append(row)
    return Cells(columns, rows)


def _differs(figure: Figure | None) -> bool:
    return figure is not None and figure.told_apart


def _ratio_cell(figure: Figure | None) -> str:
    return DASH if figure is None else ratio_text(figure.change)


def _signed_cell(figure: Figure | None) -> str:
    return DASH if figure is None else signed_text(figure.change)


def _point_row(point: PointPair) -> list[str]:
    seconds = point.seconds
    return [
        label(point.key) or DASH,
        _both(point.before.clients, point.after.clients),
        _both(point.before.ranks, point.after.ranks),
        number(seconds.before),
        number(seconds.after),
        ratio_text(seconds.change),
        verdict(seconds),
    ]


def _both(before: int, after: int) -> str:
    return f"{before:,}" if before == after else f"{before:,} {ARROW} {after:,}"
