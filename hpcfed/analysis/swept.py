"""Swept options: which were given several values, and points that differ in one alone."""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from math import log
from typing import Any

from hpcfed.analysis.choices import SIZES, Combination, values_of
from hpcfed.analysis.groups import Group
from hpcfed.analysis.labels import label
from hpcfed.errors import count
from hpcfed.options import RunConfig, named

GEOMETRIC = 1.6
"""How far the ratios of neighbouring values may be apart on a logarithmic axis."""
PROBLEM = sorted(named(problem=True), key=lambda name: name != "dataset")
"""Options that pose the problem, the data set first: data, how clients share it, and
attackers. Points with other values of these do not compete.
"""


@dataclass(frozen=True)
class Swept:
    """An option with all values that it was given, in order."""

    name: str
    values: tuple[Any, ...]

    @property
    def numeric(self) -> bool:
        return all(_is_number(value) for value in self.values)

    @property
    def geometric(self) -> bool:
        """Whether the values grow by about the same factor each time."""
        if not self.numeric or len(self.values) < 3 or min(self.values) <= 0:
            return False
        factors = [log(after / before) for before, after in pairwise(self.values)]
        return max(factors) <= GEOMETRIC * min(factors)


def _is_number(value: Any) -> bool:
    # A bool is a number to Python.
    return isinstance(value, int | float) and not isinstance(value, bool)


def swept(every: Sequence[Group]) -> list[Swept]:
    """Return the options with several values, method first, then sizes.

    An option that follows from others is none: a data set usually brings its own
    network, and a method its own learning rate.
    """
    names = dict.fromkeys(("method", *SIZES))
    for group in every:
        names |= dict.fromkeys(group.key)
    found = []
    choices = [group.options for group in every]
    for name in names:
        if len(values_of(choices, name)) > 1:
            values = _values(every, name)
            if len(values) > 1:
                found.append(Swept(name, values))
    return found


def _values(every: Sequence[Group], name: str) -> tuple[Any, ...]:
    """Return an option's values in order, without those of methods that lack it."""
    by_text = {}
    for group in every:
        value = group.options.get(name)
        if value is not None:
            by_text[json.dumps(value)] = value
    values = list(by_text.values())
    if all(_is_number(value) for value in values):
        return tuple(sorted(values))
    return tuple(sorted(values, key=str))


def problem(group: Group, options: Sequence[Swept]) -> Combination:
    """Return what was swept of the problem; the data set and clients where nothing was."""
    names = {option.name for option in options} & set(PROBLEM)
    # In the order in which people think of them.
    ordered = [name for name in PROBLEM if name in names]
    return group.options.only(ordered or ("dataset", "clients"))


def families(
    every: Sequence[Group], name: str, options: Sequence[Swept]
) -> dict[Combination, list[Group]]:
    """Put points together that differ in one option alone; by the others' values.

    Families that have a single value of the option say nothing about it.
    """
    others = ["method"]  # which labels always have
    for option in options:
        if option.name not in (name, "method"):
            others.append(option.name)
    # One that is given or not, such as a deadline, has a single value: none is swept.
    for key in dict.fromkeys(chain(*(group.key for group in every))):
        if key in RunConfig.model_fields and key not in (name, *others):
            others.append(key)
    found: dict[Combination, list[Group]] = defaultdict(list)
    for group in every:
        if group.options.get(name) is not None:
            found[group.options.only(others)].append(group)
    telling = {}
    for choice, members in found.items():
        if len(_values(members, name)) > 1:
            telling[choice] = _ordered(members, name)
    return telling


def _ordered(members: Sequence[Group], name: str) -> list[Group]:
    order = [json.dumps(value) for value in _values(members, name)]
    return sorted(members, key=lambda group: order.index(value_json(group, name)))


def value_json(group: Group, name: str) -> str:
    """Return an option's value as a key."""
    return json.dumps(group.options.get(name))


def reference(every: Sequence[Group], name: str) -> Any:
    """Return the value that most points have; among equals the default, or else the one
    in the middle.
    """
    counts = Counter(
        value_json(group, name) for group in every if name in group.options
    )
    most = max(counts.values())
    values = [json.dumps(value) for value in _values(every, name)]
    commonest = [value for value in values if counts[value] == most]
    default = json.dumps(RunConfig().model_dump(mode="json").get(name))
    if default in commonest:
        return json.loads(default)
    return json.loads(commonest[len(commonest) // 2])


@dataclass(frozen=True)
class Held:
    """Few of many points: some options are held at the value that most points have."""

    groups: list[Group]
    options: Combination
    """The options that are held."""
    left_out: int
    """Points that are not among them."""


def held(
    every: Sequence[Group], options: Sequence[Swept], *, keep: Sequence[str], most: int
) -> Held:
    """Hold one option after the other until so few choices are left that a chart can
    show them; options in `keep` stay as they are, and choices are told apart by all
    others.
    """
    kept = list(every)
    values: dict[str, Any] = {}
    # The option with most values first: fewer options need to be held.
    free = [option for option in options if option.name not in ("method", *keep)]
    for option in sorted(free, key=lambda option: -len(option.values)):
        if _num_choices(kept, options, keep) <= most:
            break
        value = reference(kept, option.name)
        values[option.name] = value
        # A method without this option stays as it is.
        kept = [group for group in kept if _agrees(group, option.name, value)]
    return Held(kept, Combination(values), len(every) - len(kept))


def _num_choices(
    every: Sequence[Group], options: Sequence[Swept], keep: Sequence[str]
) -> int:
    names = [option.name for option in options if option.name not in keep]
    return len({group.options.only(["method", *names]) for group in every})


def _agrees(group: Group, name: str, value: Any) -> bool:
    own = group.options.get(name)
    return own is None or own == value


def point_text(group: Group, options: Sequence[Swept]) -> str:
    """Return the label of a point, with its size as far as sizes differ."""
    differ = {option.name for option in options}
    words = [label(group.key)]
    if "clients" in differ:
        words.append(count(group.clients, "client"))
    if "ranks" in differ:
        words.append(count(group.ranks, "rank"))
    return ", ".join(words)


def choice_text(group: Group, options: Sequence[Swept]) -> str:
    """Return the label of a point without the problem, which the sentence has already."""
    name = label(group.key.without(*PROBLEM))
    if any(option.name == "ranks" for option in options):
        name += f", {count(group.ranks, 'rank')}"
    return name
