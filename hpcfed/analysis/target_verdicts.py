"""Who reaches a target first, and with the fewest bytes, in sentences."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isclose, isfinite

from hpcfed.analysis.choices import Combination, grouped
from hpcfed.analysis.groups import Group
from hpcfed.analysis.labels import ACCURACIES, condition_text
from hpcfed.analysis.outcomes import mean_to_target, seconds_to_target
from hpcfed.analysis.statistics import disjoint
from hpcfed.analysis.swept import Swept, choice_text, problem
from hpcfed.words import MIB, number, time_text


def target_answers(every: Sequence[Group], options: Sequence[Swept]) -> Iterator[str]:
    """Say who reaches a target first, and who with the fewest bytes, for each problem
    with several points. Points compete if the target is for the same accuracy.
    """

    def race(one: Group) -> tuple[Combination, float | None, str]:
        return problem(one, options), one.first.target, one.first.judged_series

    for (posed, target, series), members in grouped(every, race).items():
        if target is None:
            continue
        about = f"{condition_text(posed)}, target {target:g} % ({ACCURACIES[series]})"
        told = _places(members, options)
        if not told:
            yield f"{about}: no point reached it with all its seeds."
        elif len(members) > 1:
            yield f"{about}: {told}."


def _places(members: Sequence[Group], options: Sequence[Swept]) -> str:
    """Say who is first by each cost; nothing if no point reached the target."""
    fastest = _first(members, options, "seconds")
    leanest = _first(members, options, "bytes")
    if fastest is None or leanest is None:
        return ""
    told = f"{fastest.does('is', 'are')} first, after {number(fastest.spent)} s"
    told += _doubt(members)
    sends = f"; {leanest.does('sends', 'send')}"
    if leanest.names == fastest.names:
        sends = f", and {leanest.verb('sends', 'send')}"
    told += f"{sends} the fewest bytes, {number(leanest.spent / MIB)} MiB"
    clocked = _first(members, options, "virtual_seconds")
    if clocked is not None:
        when = time_text(clocked.spent)
        told += f"; {clocked.does('is', 'are')} first in virtual time, after {when}"
    holds = _first(members, options, "rounds", held=True)
    if holds is not None:
        since = number(holds.spent)
        told += f"; {holds.does('holds', 'hold')} it first, from round {since} on"
    return told


def _doubt(members: Sequence[Group]) -> str:
    """Say that repeats do not tell the least time from the others; nothing if they do,
    or if all times are the same.
    """
    known = [seconds_to_target(group) for group in members]
    known = [one for one in known if isfinite(one.centre)]
    first = min(known, key=lambda one: one.centre)
    rivals = [one for one in known if not isclose(one.centre, first.centre)]
    if not all(one.bounded for one in [first, *rivals]):
        return " (too few repeats to tell times from noise)" if rivals else ""
    if all(disjoint(first, one) for one in rivals):
        return ""
    return " (by the mean; repeats do not tell it from others)"


@dataclass(frozen=True)
class _First:
    """The points that spent the least, by their names."""

    names: tuple[str, ...]
    spent: float

    def verb(self, one: str, several: str) -> str:
        return one if len(self.names) == 1 else several

    def does(self, one: str, several: str) -> str:
        """Return `fedavg is` or `fedavg and fedprox are`."""
        return f"{' and '.join(self.names)} {self.verb(one, several)}"


def _first(
    members: Sequence[Group],
    options: Sequence[Swept],
    spent: str,
    *,
    held: bool = False,
) -> _First | None:
    """Return the points that spent the least of this up to the target, or until they
    held it, with all seeds; None if no point did, or the spent amounts are unknown.
    """
    costs = [mean_to_target(group, spent, held=held) for group in members]
    least = min(filter(isfinite, costs), default=None)
    if least is None:
        return None
    names = []
    for group, cost in zip(members, costs, strict=True):
        # Means of equal figures may differ by rounding.
        if isclose(cost, least):
            names.append(choice_text(group, options))
    return _First(tuple(names), least)
