"""Shrink a combination that is not as promised to the fewest options that show it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

from benchmarks.swarm.drawing import SIZES, Case, fields_of
from benchmarks.swarm.judging import Verdict

MOST_TRIES = 100
FEW = 6
"""The most options of which all pairs are tried."""
LEAST: dict[str, tuple[Any, ...]] = {
    "clients": (2, 3),
    "rounds": (1, 2),
    "epochs": (1,),
    "model": ("mlp",),
    "method": ("fedavg",),
    "batch_size": (64,),
}
"""Smaller values of sizes, to be tried in this order."""


def shrink(case: Case, verdict: Verdict, judge: Callable[[Case], Verdict]) -> Case:
    """Return the smallest case found that is judged alike."""
    tries = 0
    smaller = True
    while smaller:
        smaller = False
        for other in _smaller(case):
            if tries == MOST_TRIES:
                return case
            tries += 1
            if _alike(judge(other), verdict):
                case, smaller = other, True
                break
    return case


def _alike(one: Verdict, other: Verdict) -> bool:
    """Tell whether two verdicts are about the same fault."""
    # What a traceback ends with begins with the name of the exception.
    same = one.reason.split(":")[0] == other.reason.split(":")[0]
    return one.outcome == other.outcome and (same or one.outcome != "traceback")


def _smaller(case: Case) -> Iterator[Case]:
    """Yield smaller cases: first without many options, then without each."""
    free = [name for name in case.options if name not in case.kept | SIZES]
    half = len(free) // 2
    if half > 1:
        for left_out in (free[:half], free[half:]):
            yield _without(case, left_out)
    for name in free:
        yield _without(case, [name])
    if len(free) <= FEW:
        # Without one of two an option may be refused that needs the other.
        for pair in combinations(free, 2):
            yield _without(case, [*pair])
    # The first of them makes the method equal FedAvg.
    for place in range(1, len(case.neutral)):
        parts = case.neutral[:place] + case.neutral[place + 1 :]
        yield replace(case, neutral=parts)
    for name, values in LEAST.items():
        if name not in case.options or name in case.kept:
            continue
        now = case.options[name]
        tried = values[: values.index(now)] if now in values else values
        for value in tried:
            yield _with(case, name, value)


def _without(case: Case, names: list[str]) -> Case:
    left = {name: case.options[name] for name in case.options if name not in names}
    return replace(case, options=left)


def _with(case: Case, name: str, value: Any) -> Case:
    made = {**case.options, name: value}
    known = fields_of(str(made["method"]))
    left = {option: value for option, value in made.items() if option in known}
    return replace(case, options=left)
