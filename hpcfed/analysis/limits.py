"""What limits a study's points: the phase that takes most of a round, and the one in
which more ranks lose most.
"""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from hpcfed.analysis.choices import Combination
from hpcfed.analysis.groups import Group
from hpcfed.errors import UserError
from hpcfed.results.profiles import Part, read_profile


@dataclass(frozen=True)
class Loss:
    """A phase that more ranks do not make as much shorter as they should."""

    phase: str
    ranks: int
    """The fewest ranks with as many clients, which are compared with."""
    before: float
    """Its seconds there."""
    after: float
    """Its seconds on the most ranks."""


@dataclass(frozen=True)
class Limit:
    """Where the time of a round goes, at the largest point of a choice of options."""

    group: Group
    phase: str
    """The phase that takes most of a round."""
    share: float
    """Share of the time of all counted rounds: few of them may take most of it."""
    loss: Loss | None
    """None where there are no fewer ranks to compare with."""


def limits(every: Sequence[Group]) -> list[Limit]:
    """Find the limit of every choice of options, at its most ranks and clients."""
    choices: dict[Combination, list[Group]] = defaultdict(list)
    for group in every:
        choices[group.key].append(group)
    return [_limit(members) for members in choices.values()]


def _limit(members: Sequence[Group]) -> Limit:
    largest = max(members, key=lambda group: (group.ranks, group.clients))
    phases = largest.phase_means
    phase = max(phases, key=lambda name: phases[name])
    whole = sum(phases.values())
    share = phases[phase] / whole if whole > 0 else 0.0
    alike = [group for group in members if group.clients == largest.clients]
    fewest = min(alike, key=lambda group: group.ranks)
    return Limit(largest, phase, share, _loss(fewest, largest))


def _loss(fewest: Group, largest: Group) -> Loss | None:
    """Find the phase that is furthest above its share of the ideal speed-up."""
    if fewest.ranks == largest.ranks:
        return None
    ideal = largest.ranks / fewest.ranks
    before, after = fewest.phase_seconds, largest.phase_seconds
    lost = {name: after[name] - before[name] / ideal for name in after}
    phase = max(lost, key=lambda name: lost[name])
    if lost[phase] <= 0:
        return None
    return Loss(phase, fewest.ranks, before[phase], after[phase])


def profiled(every: Sequence[Group]) -> list[tuple[Group, Part]]:
    """Return what `hpcfed profile` found of each point that has a profile: the part of
    the run that took longest.
    """
    found = []
    for group in every:
        for run in group.runs:
            with suppress(UserError):  # a profile that is damaged says nothing
                profile = read_profile(run.folder)
                if profile is not None and profile.parts:
                    longest = max(profile.parts, key=lambda part: part.seconds)
                    found.append((group, longest))
                    break
    return found
