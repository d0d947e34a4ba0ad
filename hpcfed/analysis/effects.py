"""The effect of swept options on score and time, between otherwise equal points."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from math import exp, inf, isfinite, log, nan
from statistics import fmean
from typing import Any

from hpcfed.analysis.choices import Combination
from hpcfed.analysis.groups import Group, fewest_ranks
from hpcfed.analysis.labels import label
from hpcfed.analysis.outcomes import Measure, measure
from hpcfed.analysis.statistics import Estimate, of_runs, of_seeds
from hpcfed.analysis.swept import Swept, families, value_json


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


def score_effect(
    found: dict[Combination, list[Group]], option: Swept, judged: Measure
) -> Effect | None:
    """Return the effect of an option on the score; None if no two values have pairs."""
    centres = {}
    sign = -1.0 if judged.lower_is_better else 1.0
    for choice, members in found.items():
        centres[choice] = {
            value_json(group, option.name): sign * judged.estimate(group).centre
            for group in members
        }
    found_effect = _effect(centres, option, logarithmic=False)
    seeds = [len(judged.by_seed(group)) for group in chain(*found.values())]
    if found_effect is None or min(seeds) > 1:
        return found_effect
    # Pairs that agree say nothing about the noise of a single seed.
    return replace(found_effect, change=Estimate(found_effect.change.centre))


def time_effect(found: dict[Combination, list[Group]], option: Swept) -> Effect | None:
    """Return the effect of an option on the time of a round."""
    centres = {}
    for choice, members in found.items():
        centres[choice] = {
            value_json(group, option.name): -log(group.seconds.centre)
            for group in members
        }
    return _effect(centres, option, logarithmic=True)


def _effect(
    centres: dict[Combination, dict[str, float]], option: Swept, *, logarithmic: bool
) -> Effect | None:
    """Compare the two values that are furthest apart, in families that have both."""
    furthest: tuple[float, str, str, list[float]] | None = None
    texts = [json.dumps(value) for value in option.values]
    for one, other in combinations(texts, 2):
        changes = []
        for family in centres.values():
            change = family.get(one, nan) - family.get(other, nan)
            if isfinite(change):
                changes.append(change)
        if not changes:
            continue
        mean = fmean(changes)
        best, worst = (one, other) if mean >= 0 else (other, one)
        if furthest is None or abs(mean) > furthest[0]:
            signed = [change if mean >= 0 else -change for change in changes]
            furthest = (abs(mean), best, worst, signed)
    if furthest is None:
        return None
    _, best, worst, signed = furthest
    if logarithmic:
        mean_change = of_runs([exp(value) for value in signed])
    else:
        mean_change = of_seeds(signed, least=-inf)
    return Effect(option, json.loads(best), json.loads(worst), len(signed), mean_change)


@dataclass(frozen=True)
class Matters:
    """The effect of one option on score and time."""

    option: Swept
    score: Effect | None
    time: Effect | None
    by_method: dict[str, Estimate]
    """The change of each method's score from the worst to the best value."""


def effects(every: Sequence[Group], options: Sequence[Swept]) -> list[Matters]:
    """Return the effects of all options but the method, strongest on the score
    first.
    """
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
