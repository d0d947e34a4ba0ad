"""What a check has found, and what to do about it."""

from collections.abc import Hashable, Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple, TypeVar

from hpcfed.errors import count
from hpcfed.runtime.machine import cores_text

V = TypeVar("V", bound=Hashable)


class Level(StrEnum):
    """How good or bad a finding is."""

    OK = "OK"
    SKIPPED = "not checked"
    WARNING = "warning"
    ERROR = "error"


class Finding(NamedTuple):
    """One line of the report."""

    check: str
    level: Level
    told: str
    """What was found."""
    advice: str = ""
    """What to do; empty if nothing."""
    ranks: tuple[int, ...] = ()
    """Whom it is about; empty: all ranks alike."""
    figures: tuple[tuple[str, float], ...] = ()
    """What was measured, by names that say the unit, for programs."""


def fine(check: str, told: str, **figures: float) -> Finding:
    """Return that all is well."""
    return Finding(check, Level.OK, told, figures=tuple(figures.items()))


def skipped(check: str, reason: str) -> Finding:
    """Return why nothing was checked."""
    return Finding(check, Level.SKIPPED, reason)


def warning(
    check: str, told: str, advice: str, *ranks: int, **figures: float
) -> Finding:
    """Return what makes runs slow, or may end them."""
    return Finding(check, Level.WARNING, told, advice, ranks, tuple(figures.items()))


def error(check: str, told: str, advice: str, *ranks: int, **figures: float) -> Finding:
    """Return what ends runs, or spoils their results."""
    return Finding(check, Level.ERROR, told, advice, ranks, tuple(figures.items()))


def worst(findings: Iterable[Finding]) -> Level:
    """Return the level of the worst finding: OK, a warning or an error."""
    levels = {finding.level for finding in findings}
    for level in (Level.ERROR, Level.WARNING):
        if level in levels:
            return level
    return Level.OK


def ranks_text(ranks: Iterable[int]) -> str:
    """Return `rank 3` or `ranks 0-3,8`."""
    several = sorted(set(ranks))
    return f"{'rank' if len(several) == 1 else 'ranks'} {cores_text(several)}"


def by_value(values: Mapping[int, V]) -> dict[V, list[int]]:
    """Return the ranks that have each value, the most common value first."""
    found: dict[V, list[int]] = {}
    for rank, value in sorted(values.items()):
        found.setdefault(value, []).append(rank)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def summary(findings: Iterable[Finding]) -> str:
    """Return `no errors, 2 warnings`."""
    levels = [finding.level for finding in findings]
    numbers = []
    for level in (Level.ERROR, Level.WARNING):
        number = levels.count(level)
        numbers.append(count(number, level) if number else f"no {level}s")
    return ", ".join(numbers)
