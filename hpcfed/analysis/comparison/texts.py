"""A comparison in words."""

from collections.abc import Iterable, Sequence

from hpcfed.analysis.comparison.changes import Change
from hpcfed.analysis.comparison.comparison import Comparison
from hpcfed.analysis.comparison.points import Figure, PointPair
from hpcfed.analysis.groups import Group
from hpcfed.analysis.labels import label, size_text
from hpcfed.analysis.statistics import Estimate
from hpcfed.words import interval, number, ratio, signed

MOST_NAMED = 5
"""Most changes or points that a sentence names; more are counted."""
WIDEST = 60
"""Longest name in a sentence or on the terminal, in characters; the page's tables have
full names.
"""
NOISE = (
    "one run on a side cannot tell noise; a folder of several runs may stand for A or B"
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
        return []
    if rounds == {0}:
        return [
            "Rounds differ, and no round was evaluated on both sides: what models have "
            "learnt is not compared."
        ]
    return [f"Rounds differ: both sides are judged {when(points)}."]


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
    told = f"{ratio_text(seconds.change)} times A's seconds per round"
    if seconds.told_apart:
        return f"B is {_share(seconds)}: {told}, mostly {_largest(phases)}."
    if not seconds.beyond_interval:
        remark = "" if seconds.repeated else f"; {NOISE}"
        return f"Speed is not told apart: B takes {told}{remark}."
    return f"B took {told}, mostly {_largest(phases)}: {NOISE}."


def _share(figure: Figure) -> str:
    """Return `12.3 % slower`; without the percentage if it would be hard to read."""
    change = figure.change.centre
    if not 0.5 < change < 2:
        return _word(figure)
    return f"{100 * abs(change - 1):.1f} % {_word(figure)}"


def _largest(phases: Sequence[Figure]) -> str:
    """Return the phase whose time changed most."""
    most = max(phases, key=lambda phase: abs(phase.after - phase.before))
    phase = most.name.removeprefix("phase ")
    return f"{phase}, {number(most.before)} {ARROW} {number(most.after)} ms"


def _other_costs(figures: Sequence[Figure]) -> list[str]:
    """Say which other costs have changed, in one sentence."""
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
    """Return one or a few words: `slower`, `not told apart`, `same`."""
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


def both(before: int, after: int) -> str:
    """Return `20`, or `20 → 40` if they differ."""
    return f"{before:,}" if before == after else f"{before:,} {ARROW} {after:,}"
