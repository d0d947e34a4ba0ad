"""Choices of options: keys that group runs, and what distinguishes choices."""

import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache, cached_property
from typing import Any, TypeVar

from hpcfed.options import RunConfig, facts, facts_of, known, named

Item = TypeVar("Item")
Alike = TypeVar("Alike", bound=Hashable)

SIZES = ("clients", "ranks")
"""Figures are drawn over these, so they are never in a key."""
MEASURED_ON = ("on", "stacked_seeds", "side")
"""Not options: how a run was measured, and whether it is A or B of a comparison."""


class Combination(dict[str, Any]):
    """Options with their values, usable as a key; never changed once it is made. Two
    are equal if the values are equal as JSON; the order of the options is kept, but
    does not matter.
    """

    @cached_property
    def _identity(self) -> str:
        # Values may be lists, which have no hash, or NaN, which differs from itself.
        return json.dumps(self, sort_keys=True)

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self._identity)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Combination) and self._identity == other._identity

    def __ne__(self, other: object) -> bool:
        return not self == other  # dict has its own, which knows no NaN

    def only(self, names: Sequence[str]) -> "Combination":
        """Return the options with these names, in this order, if present."""
        chosen = {name: self[name] for name in names if name in self}
        return Combination(chosen)

    def without(self, *names: str) -> "Combination":
        others = [name for name in self if name not in names]
        return self.only(others)


def grouped(
    items: Iterable[Item], by: Callable[[Item], Alike]
) -> dict[Alike, list[Item]]:
    """Return items that are alike together, by what they have in common."""
    found: dict[Alike, list[Item]] = defaultdict(list)
    for item in items:
        found[by(item)].append(item)
    return found


def distinguish(choices: Sequence[Combination]) -> list[Combination]:
    """Return a key for each choice: its method, and the options that distinguish it
    from the others of its method, beyond clients and ranks.

    An option is left out if earlier ones already distinguish the choices. A data set
    usually has its own network, rounds and target, which would make keys long without
    adding information.
    """
    always = _always(choices)
    by_method = grouped(choices, lambda choice: str(choice["method"]))
    # Once per method, because it looks at every option of every choice: once per choice
    # took minutes for a thousand runs.
    names = {}
    for method, members in by_method.items():
        names[method] = _distinguishing(members, always)
    keys = []
    for choice in choices:
        method = choice["method"]
        keys.append(_key(choice, names[method]))
    return keys


def _always(choices: Sequence[Combination]) -> list[str]:
    """Return the options that must be in the keys of all methods."""
    # A dict as an ordered set: methods may have such options of their own.
    told: dict[str, None] = {}
    for method in sorted({str(choice["method"]) for choice in choices}):
        for name, stated in facts(method).items():
            if stated.told == "always":
                told[name] = None
    always = [name for name in told if len(values_of(choices, name)) > 1]
    datasets = {choice.only(("dataset",)) for choice in choices}
    # Without these in the key, methods would be compared by their networks, or by how
    # long they learnt. A data set may have its own.
    for name in named(told="beside the data set"):
        if len({choice.only(("dataset", name)) for choice in choices}) > len(datasets):
            always.append(name)
    return always


def values_of(choices: Sequence[Combination], name: str) -> set[str]:
    """Return an option's different values as JSON; `null` for a choice without it."""
    return {json.dumps(choice.get(name)) for choice in choices}


def _distinguishing(members: Sequence[Combination], always: Sequence[str]) -> list[str]:
    """Return names of options that together distinguish all members.

    An option is taken if members that agree in all options so far differ in it.
    """
    names: set[str] = set()
    for choice in members:
        names.update(choice)
    names.difference_update(SIZES, MEASURED_ON, always)
    taken = set()
    # Sets of members that agree in all options taken so far.
    alike = _split([list(members)], always)
    # What runs choose themselves follows from other options, so these come first.
    stated = facts(members[0]["method"])
    chosen = {name for name in names & stated.keys() if stated[name].chosen_later}
    for name in (*sorted(names - chosen), *sorted(chosen), *MEASURED_ON):
        # Greedy, in alphabetical order: keys do not depend on the order of runs.
        finer = _split(alike, [name])
        if len(finer) > len(alike):
            taken.add(name)
            alike = finer
    own = [name for name in (*sorted(names), *MEASURED_ON) if name in taken]
    return [*always, *own]


def _split(
    alike: Sequence[Sequence[Combination]], names: Sequence[str]
) -> list[Sequence[Combination]]:
    """Split sets of choices further, so that members of each agree in these options."""

    def values(choice: Combination) -> str:
        return json.dumps([choice.get(name) for name in names])

    made: list[Sequence[Combination]] = []
    for members in alike:
        if len(members) == 1:  # nothing left to distinguish
            made.append(members)
            continue
        made += grouped(members, values).values()
    return made


def _key(choice: Combination, names: Sequence[str]) -> Combination:
    run = _run_of(choice)
    telling = ["method"]
    for name in names:
        if name in choice and not _idle(choice, name, run):
            telling.append(name)
    return choice.only(telling)


def _run_of(choice: Combination) -> RunConfig:
    known = {name: choice[name] for name in choice if name in RunConfig.model_fields}
    # No checks: these options come from a run, which has checked them.
    return RunConfig.model_construct(**known)


def _is_needed(name: str, run: RunConfig) -> bool:
    """Tell whether the options that this one belongs to are given."""
    field = RunConfig.model_fields.get(name)
    return field is None or all(need.met(run) for need in facts_of(field).needs)


def _idle(choice: Combination, name: str, run: RunConfig) -> bool:
    """Tell whether the option has no effect in this choice; then its key omits it."""
    value = choice[name]
    field = RunConfig.model_fields.get(name)
    if field is not None:
        if not _is_needed(name, run):
            return True
        if facts_of(field).off and value == field.default:
            return True
    if isinstance(value, bool):
        return False
    # A default of None, 0 or "" means none, or is derived from other options. Choices
    # with another value are distinguished by that value.
    default = defaults_of(choice["method"]).get(name)
    # 0 == False in Python, so bools were handled above.
    return value in (None, 0, "") and value == default


def differences(one: Combination, other: Combination) -> list[str]:
    """Return the options that both choices have and in which they differ, although a key
    may leave them out, as far as they act in one. What runs have chosen themselves
    follows from the others.
    """
    found = []
    for name in sorted(_acting(one) | _acting(other)):
        both = name in one and name in other
        if both and json.dumps(one[name]) != json.dumps(other[name]):
            found.append(name)
    return found


def _acting(choice: Combination) -> set[str]:
    """Return the options that have an effect in this choice, beside clients and ranks."""
    run = _run_of(choice)
    stated = facts(choice["method"])
    found = set()
    for name in choice:
        chosen = name in stated and stated[name].chosen_later
        if name not in (*SIZES, *MEASURED_ON) and not chosen:
            found.add(name)
    return {name for name in found if _is_needed(name, run)}


@cache
def defaults_of(method: str) -> dict[str, Any]:
    """Return the defaults of general options, and of the method if it is installed."""
    return {name: field.default for name, field in known(method).items()}
