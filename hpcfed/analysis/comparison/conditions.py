"""`--fail-if`: what must not become worse from A to B, and whether it has."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from math import isfinite
from pathlib import Path

from hpcfed.analysis.comparison.comparison import (
    ENERGY,
    MEMORY,
    SECONDS,
    SENT,
    Comparison,
    Figure,
)
from hpcfed.analysis.comparison.shown import NOISE, change_text
from hpcfed.errors import UserError, count, unknown

IN_PER_CENT = {
    "slower": SECONDS.name,
    "more-memory": MEMORY.name,
    "more-bytes": SENT.name,
    "more-energy": ENERGY.name,
}
"""Conditions about ratios, with the figure that each checks."""
LESS_ACCURATE = "less-accurate"
NAMES = (*IN_PER_CENT, LESS_ACCURATE)


@dataclass(frozen=True)
class Condition:
    name: str
    limit: float
    """The largest ratio, or loss of points, that does not fail."""
    text: str
    """The condition as the user wrote it."""


class Decision(IntEnum):
    """The result of a condition, the worst last."""

    DOES_NOT_HOLD = 0
    UNDECIDED = 1
    """It would hold, but by one run of a side, which other load may have slowed."""
    HOLDS = 2


@dataclass(frozen=True)
class JudgedCondition:
    """A condition, and the figure that came closest to meeting it."""

    condition: Condition
    decision: Decision
    figure: Figure

    @property
    def line(self) -> str:
        """The line to print."""
        decision = self.decision.name.lower().replace("_", " ")
        about = f"{self.figure.name}: {change_text(self.figure)}"
        line = f"--fail-if {self.condition.text}: {decision}: {about}"
        if not self.figure.repeated:
            line += f"; {NOISE}"
        return line


def read_conditions(texts: Sequence[str], paths: Sequence[Path]) -> list[Condition]:
    """Read the arguments of --fail-if, which needs two paths."""
    if texts and len(paths) != 2:
        given = count(len(paths), "path")
        raise UserError(f"--fail-if compares two paths, A and B; {given} given")
    return [_condition(text) for text in texts]


def _condition(text: str) -> Condition:
    """Read `slower=5%` or `less-accurate=1`."""
    name, _, value = text.partition("=")
    if name not in NAMES:
        raise unknown("condition of --fail-if", name, NAMES)
    in_per_cent = name in IN_PER_CENT
    example = f"{name}=5%" if in_per_cent else f"{name}=1"
    unit = "per cent" if in_per_cent else "points of accuracy"
    wrong = UserError(f"--fail-if {text}: give a number of {unit}, as in {example}")
    if value.endswith("%") != in_per_cent:
        raise wrong
    try:
        amount = float(value.removesuffix("%"))
    except ValueError:
        raise wrong from None
    if not isfinite(amount) or amount < 0:
        raise wrong
    # Costs are compared as ratios, B / A, and accuracies as differences.
    limit = 1 + amount / 100 if in_per_cent else amount
    return Condition(name, limit, text)


def judge_all(
    conditions: Sequence[Condition],
    comparison: Comparison | None,
    *,
    one_run_decides: bool = False,
) -> list[JudgedCondition]:
    """Judge all conditions; with `one_run_decides`, none stays undecided."""
    if comparison is None:
        return []
    found = []
    for condition in conditions:
        judged = _judge(condition, comparison)
        if one_run_decides and judged.decision is Decision.UNDECIDED:
            judged = replace(judged, decision=Decision.HOLDS)
        found.append(judged)
    return found


def _judge(condition: Condition, comparison: Comparison) -> JudgedCondition:
    """Tell whether a condition holds beyond the noise, over all points."""
    if condition.name == LESS_ACCURATE:
        figures = [figure for figure in comparison.headlines if figure.unit == "%"]
    else:
        wanted = IN_PER_CENT[condition.name]
        figures = [figure for figure in comparison.costs if figure.name == wanted]
    if not figures:
        raise UserError(
            f"--fail-if {condition.text}: not all runs of both sides have recorded it"
        )
    judged = [
        JudgedCondition(condition, _decide(condition, figure), figure)
        for figure in figures
    ]
    # There are two accuracies, the clients' and the global model's: either may fall.
    return max(judged, key=_badness)


def _decide(condition: Condition, figure: Figure) -> Decision:
    # With one run each, use the interval over rounds, or the figure alone.
    if _worse(figure) <= condition.limit or not figure.beyond_interval:
        return Decision.DOES_NOT_HOLD
    return Decision.HOLDS if figure.repeated else Decision.UNDECIDED


def _worse(figure: Figure) -> float:
    """Return the ratio, or the points lost."""
    # `neutral` is 1 for the ratio of a cost, of which more is worse, and 0 for the
    # difference of an accuracy, of which less is.
    centre = figure.change.centre
    return centre if figure.neutral else -centre


def _badness(judged: JudgedCondition) -> tuple[Decision, float]:
    return judged.decision, _worse(judged.figure)
