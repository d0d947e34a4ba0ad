"""Swept options: which have several values, points that differ in one of them, and its
effect on score and time.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, pairwise
from math import exp, inf, isfinite, log, nan
from operator import itemgetter
from statistics import fmean
from typing import Any

from hpcfed.analysis.choices import (
    SIZES,
    Combination,
    differences,
    grouped,
    values_of,
)
from hpcfed.analysis.groups import Group, fewest_ranks
from hpcfed.analysis.labels import label
from hpcfed.analysis.outcomes import Measure, measure
from hpcfed.analysis.statistics import Estimate, of_runs, of_seeds
from hpcfed.errors import count
from hpcfed.options import RunConfig, named

GEOMETRIC = 1.6
"""How unequal steps between neighbouring values may be on a logarithmic axis."""
PROBLEM = sorted(named(problem=True), key=lambda name: name != "dataset")
"""Options that define the problem, the data set first: data, its split between clients,
and attackers. Points with different values of these do not compete.
"""


@dataclass(frozen=True)
class Swept:
    """An option with all its values, in order."""

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
        # Logarithms, because equal factors are equal steps on a logarithmic axis.
        factors = [log(after / before) for before, after in pairwise(self.values)]
        # Also for decreasing steps: values are sorted, so all factors are positive.
        return max(factors) <= GEOMETRIC * min(factors)


def _is_number(value: Any) -> bool:
    # In Python, a bool is a number.
    return isinstance(value, int | float) and not isinstance(value, bool)


def swept(every: Sequence[Group]) -> list[Swept]:
    """Return the options with several values, method first, then sizes.

    An option that follows from others does not count: a data set usually has its own
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
    """Return an option's values in order, ignoring methods that lack it."""
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
    """Return the swept options of the problem; the data set and clients if none."""
    names = {option.name for option in options} & set(PROBLEM)
    # In the order in which people think of them.
    ordered = [name for name in PROBLEM if name in names]
    return group.options.only(ordered or ("dataset", "clients"))


def families(
    every: Sequence[Group], name: str, options: Sequence[Swept]
) -> dict[Combination, list[Group]]:
    """Group points that differ in only one option, by the values of the others.

    Families with a single value of the option are left out, because they say nothing
    about it.
    """
    others = ["method"]  # labels always have it
    for option in options:
        if option.name not in (name, "method"):
            others.append(option.name)
    # An option that is either given or not, such as a deadline, has a single value, so
    # it does not count as swept.
    for key in dict.fromkeys(chain(*(group.key for group in every))):
        if key in RunConfig.model_fields and key not in (name, *others):
            others.append(key)
    # Points of methods without the option have no value to compare.
    having = [group for group in every if group.options.get(name) is not None]
    found = grouped(having, lambda group: group.options.only(others))
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
    """Return the most frequent value; among equals the default, else the middle one."""
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
    """A selection of points: some options are held at their most frequent value."""

    groups: list[Group]
    options: Combination
    """The held options with their values."""
    left_out: int
    """Number of points left out."""


def held(
    every: Sequence[Group], options: Sequence[Swept], *, keep: Sequence[str], most: int
) -> Held:
    """Hold one option after the other until few enough choices are left for a chart.
    Options in `keep` are never held, and choices are distinguished by all others.
    """
    kept = list(every)
    values: dict[str, Any] = {}
    # The option with the most values first, so that fewer options need to be held.
    free = [option for option in options if option.name not in ("method", *keep)]
    for option in sorted(free, key=lambda option: -len(option.values)):
        if _num_choices(kept, options, keep) <= most:
            break
        value = reference(kept, option.name)
        values[option.name] = value
        # A method without this option stays.
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
    """Return the label of a point, with its size if sizes differ."""
    differ = {option.name for option in options}
    words = [label(group.key)]
    if "clients" in differ:
        words.append(count(group.clients, "client"))
    if "ranks" in differ:
        words.append(count(group.ranks, "rank"))
    return ", ".join(words)


def choice_text(group: Group, options: Sequence[Swept]) -> str:
    """Return the label of a point without the problem, which the sentence names."""
    name = label(group.key.without(*PROBLEM))
    if any(option.name == "ranks" for option in options):
        name += f", {count(group.ranks, 'rank')}"
    return name


@dataclass(frozen=True)
class Effect:
    """The effect of an option on a figure, between two of its values."""

    option: Swept
    best: Any
    """The value that does best on average over everything else."""
    worst: Any
    pairs: int
    """Pairs of points that differ only in these two values."""
    change: Estimate
    """The mean difference of a score; for times, the ratio of the worst to the best."""
    besides: tuple[str, ...] = ()
    """Other options in which a pair differs: those that changed with it, as in a variant."""


def score_effect(
    found: dict[Combination, list[Group]], option: Swept, judged: Measure
) -> Effect | None:
    """Return the effect of an option on the score; None if no two values have pairs."""
    sign = -1.0 if judged.metric.lower_is_better else 1.0
    effect = _effect(found, option, lambda group: sign * judged.estimate(group).centre)
    seeds = [len(judged.by_seed(group)) for group in chain(*found.values())]
    if effect is None or min(seeds) > 1:
        return effect
    # Pairs that agree say nothing about the noise of a single seed.
    return replace(effect, change=Estimate(effect.change.centre))


def time_effect(found: dict[Combination, list[Group]], option: Swept) -> Effect | None:
    """Return the effect of an option on the time of a round."""
    return _effect(
        found, option, lambda group: -log(group.seconds.centre), logarithmic=True
    )


def _effect(
    found: dict[Combination, list[Group]],
    option: Swept,
    of: Callable[[Group], float],
    *,
    logarithmic: bool = False,
) -> Effect | None:
    """Compare the two values that are furthest apart, in families that have both."""
    families = []
    for members in found.values():
        families.append({value_json(one, option.name): of(one) for one in members})
    pairs = []
    texts = [json.dumps(value) for value in option.values]
    for best, worst in combinations(texts, 2):
        changes = [one.get(best, nan) - one.get(worst, nan) for one in families]
        known = [change for change in changes if isfinite(change)]
        if not known:
            continue
        mean = fmean(known)
        if mean >= 0:
            pairs.append((mean, best, worst, known))
        else:
            # In the direction of the mean; changes against it become negative.
            pairs.append((-mean, worst, best, [-change for change in known]))
    if not pairs:
        return None
    _, best, worst, signed = max(pairs, key=itemgetter(0))
    if logarithmic:
        mean_change = of_runs([exp(value) for value in signed])
    else:
        mean_change = of_seeds(signed, least=-inf)
    ends = json.loads(best), json.loads(worst)
    besides = _besides(found.values(), option.name, (best, worst))
    return Effect(option, *ends, len(signed), mean_change, besides)


def _besides(
    found: Iterable[Sequence[Group]], name: str, ends: tuple[str, str]
) -> tuple[str, ...]:
    """Return the other options in which points with these two values differ."""
    names: set[str] = set()
    for members in found:
        by_value = {value_json(one, name): one.options for one in members}
        if all(end in by_value for end in ends):
            names.update(differences(*(by_value[end] for end in ends)))
    return tuple(sorted(names - {name}))


@dataclass(frozen=True)
class Matters:
    """The effect of one option on score and time."""

    option: Swept
    score: Effect | None
    time: Effect | None
    by_method: dict[str, Estimate]
    """The change of each method's score from the worst to the best value."""


def effects(every: Sequence[Group], options: Sequence[Swept]) -> list[Matters]:
    """Return the effects of all options but the method, strongest first."""
    judged = measure(every)
    # Points on other ranks add no further pairs: their accuracy is the same.
    once = fewest_ranks(every)
    others = [option for option in options if option.name != "ranks"]
    found = []
    for option in options:
        if option.name == "method":
            continue
        score, by_method = None, {}
        if judged is not None and option.name != "ranks":
            alike = families(once, option.name, others)
            score = score_effect(alike, option, judged)
            if score is not None:
                by_method = _by_method(alike, score, judged)
        time = time_effect(families(every, option.name, options), option)
        found.append(Matters(option, score, time, by_method))

    def strength(one: Matters) -> float:
        return 0.0 if one.score is None else -abs(one.score.change.centre)

    return sorted(found, key=strength)


def _by_method(
    alike: dict[Combination, list[Group]], effect: Effect, judged: Measure
) -> dict[str, Estimate]:
    """Return the change of each method's score from the worst to the best value of an
    option. The interval comes from seeds if a method has one pair of points, and from
    pairs if it has several.
    """
    name = effect.option.name
    gains: dict[str, list[Estimate]] = defaultdict(list)
    for choice, members in alike.items():
        ends = {}
        for group in members:
            for end in (effect.best, effect.worst):
                if group.options.get(name) == end:
                    ends[str(end)] = group
        if len(ends) == 2:
            gain = judged.gain(ends[str(effect.best)], ends[str(effect.worst)])
            gains[label(choice.only(["method"]))].append(gain)
    found = {}
    for method, several in gains.items():
        found[method] = several[0]
        if len(several) > 1:
            found[method] = of_seeds([gain.centre for gain in several], least=-inf)
    return found
