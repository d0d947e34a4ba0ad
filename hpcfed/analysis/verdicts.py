"""Verdicts of a study: one for each question that its points can answer, in sentences.

A question without an answer has no verdict.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from hpcfed.analysis.choices import Combination
from hpcfed.analysis.contests import Contest, Frontier, contests, frontiers
from hpcfed.analysis.costmodel import fit_groups
from hpcfed.analysis.groups import Group
from hpcfed.analysis.labels import (
    MOST_SENTENCES,
    condition_text,
    few,
    text,
    times_text,
    value_text,
)
from hpcfed.analysis.outcomes import COSTS, Measure, measure, run_bytes
from hpcfed.analysis.scaling import growths, scalings
from hpcfed.analysis.server_costs import server_costs
from hpcfed.analysis.server_findings import fit_answers, growth_answers
from hpcfed.analysis.speed_verdicts import (
    client_answers,
    limit_answers,
    prediction_answers,
    strong_answers,
    weak_answers,
)
from hpcfed.analysis.statistics import Estimate, disjoint, of_runs, ratio
from hpcfed.analysis.swept import (
    Effect,
    Matters,
    Swept,
    choice_text,
    effects,
    point_text,
    swept,
)
from hpcfed.analysis.target_verdicts import target_answers
from hpcfed.errors import count
from hpcfed.results.study import StudyRecord
from hpcfed.words import number, times_as

MOST_LETTERS = 48
"""Longest word in a sentence, in characters."""
LONG_WORD = re.compile(rf"\S{{{MOST_LETTERS + 1},}}")
SAME_BYTES = 0.02
"""Up to this relative difference, two methods send the same number of bytes."""


@dataclass(frozen=True)
class Verdict:
    question: str
    answers: list[str]
    """Whole sentences."""
    section: str
    """The section of the page with the figures."""


def verdicts(
    every: Sequence[Group], studies: Sequence[StudyRecord] = ()
) -> list[Verdict]:
    """Answer every question that the points can answer. Points of the studies that
    have failed tell where the server's model ends.
    """
    costs = server_costs(every, studies)
    options = swept(every)
    scaled = scalings(every)
    strong = [one for one in scaled if one.kind == "strong"]
    weak = [one for one in scaled if one.kind == "weak"]
    weighed = frontiers(every, options)
    asked = [
        Verdict("Which method wins where?", _wins(contests(every, options)), "methods"),
        Verdict("Which options matter?", _matters(every, options), "options"),
        Verdict("How does it scale over ranks?", strong_answers(strong), "scaling"),
        Verdict(
            "And with the same number of clients on every rank?",
            weak_answers(weak),
            "scaling",
        ),
        Verdict(
            "How does it scale by clients?", client_answers(growths(every)), "clients"
        ),
        Verdict("What limits it?", limit_answers(every, options), "phases"),
        Verdict("Does the server fit between rounds?", fit_answers(costs), "server"),
        Verdict("How does the server grow?", growth_answers(costs), "server"),
        Verdict(
            "What does it cost?",
            _costs(every, weighed, options),
            "pareto" if weighed else "target",
        ),
        Verdict(
            "Can times be predicted?", prediction_answers(fit_groups(every)), "model"
        ),
    ]
    answered = [verdict for verdict in asked if verdict.answers]
    return [_readable(verdict) for verdict in answered]


def _readable(verdict: Verdict) -> Verdict:
    """Cut words that are too long to read, such as names of files."""
    cut = []
    for line in verdict.answers:
        cut.append(LONG_WORD.sub(lambda found: f"{found[0][:MOST_LETTERS]}…", line))
    return replace(verdict, answers=cut)


# Methods.


def _wins(found: Sequence[Contest]) -> list[str]:
    if len(found) <= MOST_SENTENCES:
        return [_contest(contest) for contest in found]
    return _wins_counted(found)


def _contest(contest: Contest) -> str:
    """Say who is best, and what else the first two differ in."""
    besides = ""
    if contest.besides:
        besides = f"; they differ in {', '.join(contest.besides)}, too"
    return f"{_best(contest)}{besides}."


def _best(contest: Contest) -> str:
    where = condition_text(contest.condition)
    best = contest.entrant(contest.winner)
    score = text(contest.judged.estimate(contest.winner), contest.judged.unit)
    second = contest.entrant(contest.ranking[1])
    lead = text(contest.leads[0], contest.judged.steps)
    if contest.decided:
        return f"{where}: {best} wins with {score}, {lead} ahead of {second}"
    if contest.leads[0].centre == 0:
        return f"{where}: {best} and {second} are equal, with {score}"
    if contest.seeds < 2:
        return (
            f"{where}: {best} is ahead with {score}, {lead} before {second}; "
            "one seed cannot tell whether that is noise"
        )
    rivals = " and ".join(contest.entrant(rival) for rival in contest.rivals)
    return (
        f"{where}: {best} is ahead with {score}, but {rivals} "
        f"{_are(contest.rivals)} not told apart from it by {contest.seeds} seeds; "
        f"its lead over {second} is {lead}"
    )


def _are(things: Sequence[object]) -> str:
    return "is" if len(things) == 1 else "are"


def _wins_counted(found: Sequence[Contest]) -> list[str]:
    """Summarise many contests, and name the clearest of them."""
    decided = [contest for contest in found if contest.decided]
    wins = Counter(contest.entrant(contest.winner) for contest in decided)
    words = [f"{name} wins {times}" for name, times in wins.most_common(MOST_SENTENCES)]
    undecided = len(found) - len(decided)
    if undecided:
        fewest = min(contest.seeds for contest in found)
        words.append(f"{undecided} are not told apart by {count(fewest, 'seed')}")
    sentences = [f"Of {count(len(found), 'condition')}, {', '.join(words)}."]
    if decided:
        clearest = max(decided, key=lambda contest: contest.leads[0].centre)
        sentences.append(f"The largest lead: {_contest(clearest)}")
    ahead = Counter(contest.entrant(contest.winner) for contest in found)
    name, times = ahead.most_common(1)[0]
    sentences.append(
        f"By the means alone, {name} is ahead most often: {times} of {len(found)} times."
    )
    return sentences


# Options.


def _matters(every: Sequence[Group], options: Sequence[Swept]) -> list[str]:
    """Say what options do: first those with a certain effect, then those with too few
    seeds, and last the names of those whose effect may be noise.
    """
    judged = measure(every)
    sure, single, noise = [], [], []
    for one in effects(every, options):
        if one.score is None or judged is None:
            continue
        change = one.score.change
        if change.centre == 0 or not isfinite(change.centre):
            continue
        opposite = _opposite(one, judged)
        if opposite:
            sure.append(opposite)
        elif not change.bounded:
            told = _effect(one.score, judged)
            single.append(f"{told}; too few seeds or pairs to tell it from noise.")
        elif change.low <= 0:
            noise.append(one.option.name)
        else:
            sure.append(f"{_effect(one.score, judged)}.")
    sentences = few([*sure, *single], "option")
    if noise:
        sentences.append(f"Not told apart from noise: {', '.join(noise)}.")
    return sentences


def _effect(effect: Effect, judged: Measure) -> str:
    name = effect.option.name
    best, worst = value_text(effect.best), value_text(effect.worst)
    gain = text(effect.change, judged.steps)
    pairs = count(effect.pairs, "pair")
    others = "nothing else"
    if effect.besides:
        others = f"{', '.join(effect.besides)}, too"
    return (
        f"{name}: {best} is {gain} of {judged.name} better than {worst}, over {pairs} of "
        f"points that differ in {others}"
    )


def _opposite(one: Matters, judged: Measure) -> str:
    """Say that an option certainly helps one method and harms another, else nothing."""
    helped, harmed = [], []
    for method, change in one.by_method.items():
        told = f"{method} ({text(change, judged.steps)})"
        # With too few seeds the ends are NaN, which is neither above nor below 0.
        if change.low > 0:
            helped.append(told)
        elif change.high < 0:
            harmed.append(told)
    if one.score is None or not (helped and harmed):
        return ""
    name = ", ".join([one.option.name, *one.score.besides])
    best, worst = value_text(one.score.best), value_text(one.score.worst)
    return (
        f"{name}: {best} instead of {worst} helps {' and '.join(helped)} and harms "
        f"{' and '.join(harmed)}."
    )


def _costs(
    every: Sequence[Group], found: Sequence[Frontier], options: Sequence[Swept]
) -> list[str]:
    methods = few(list(_prices(contests(every, options))), "method")
    targets = few(list(target_answers(every, options)), "problem")
    ends = few(list(_ends(found, options)), "problem")
    sentences = [*methods, *targets, *ends]
    energies = [group for group in every if isfinite(_energy(group))]
    if len(energies) > 1:
        least, most = min(energies, key=_energy), max(energies, key=_energy)
        sentences.append(
            f"The GPUs of a run's workers take from {number(_energy(least))} J "
            f"({point_text(least, options)}) to {number(_energy(most))} J "
            f"({point_text(most, options)})."
        )
    return sentences


def _prices(found: Sequence[Contest]) -> Iterator[str]:
    """Compare the rounds of all methods with those of the fastest, under the conditions
    that both were run under.
    """
    by_method: dict[str, dict[Combination, Group]] = defaultdict(dict)
    for contest in found:
        for group in contest.ranking:
            by_method[contest.entrant(group)][contest.condition] = group
    means = {}
    for name, points in by_method.items():
        means[name] = of_runs([group.seconds.centre for group in points.values()])
    # Without any contest there is no fastest, and the loop below has nothing to do.
    fastest, *others = sorted(means, key=lambda name: means[name].centre) or [""]
    for name in others:
        base, mine = by_method[fastest], by_method[name]
        pairs = [(mine[where], base[where]) for where in mine if where in base]
        if not pairs:
            continue
        times = _over_pairs([ratio(one.seconds, two.seconds) for one, two in pairs])
        longer = times_as(times_text(times, " times"), "long")
        told = f"A round of {name} takes {longer} as one of {fastest}"
        yield f"{told}{_bytes_told(pairs)}."


def _over_pairs(ratios: Sequence[Estimate]) -> Estimate:
    """Return a ratio over several pairs of points; for one pair, with the interval of
    its repeats.

    Pairs may agree by chance, which says nothing if the repeats of one are far apart.
    """
    if len(ratios) == 1:
        return ratios[0]
    together = of_runs([one.centre for one in ratios])
    loose = [one for one in ratios if one.vague]
    if not loose:
        return together
    return Estimate(together.centre, loose[0].low, loose[0].high)


def _bytes_told(pairs: Sequence[tuple[Group, Group]]) -> str:
    """Return the end of a sentence: how the bytes of the first of each pair compare with
    those of the second. Nothing if they are the same.
    """
    mine = [run_bytes(one).centre for one, _ in pairs]
    base = [run_bytes(other).centre for _, other in pairs]
    # Zero has no logarithm: a method may send nothing.
    both = [
        (one, two) for one, two in zip(mine, base, strict=True) if min(one, two) > 0
    ]
    if both:
        times = of_runs([one / two for one, two in both]).centre
        same = abs(times - 1) <= SAME_BYTES
        return "" if same else f" and sends {number(times)} times the bytes"
    if any(base) and not any(mine):
        return " and sends nothing"
    return ", which sends nothing" if any(mine) and not any(base) else ""


def _energy(group: Group) -> float:
    return COSTS["energy"].of(group).centre


def _ends(found: Sequence[Frontier], options: Sequence[Swept]) -> Iterator[str]:
    """Say what the best point of each problem costs, and what a lower cost achieves."""
    for one in found:
        if one.cost is not COSTS["seconds"] or len(one.best) < 2:
            continue
        cheapest, best = one.best[0], one.best[-1]
        # Do not report a price if noise may explain the order of the times.
        if not disjoint(cheapest.cost, best.cost):
            continue
        is_known = cheapest.cost.bounded and best.cost.bounded
        doubt = "" if is_known else "; too few repeats to tell these times from noise"
        unit = one.judged.unit
        yield (
            f"{condition_text(one.problem)}: the best {one.judged.name}, "
            f"{text(best.score, unit)}, takes {times_text(best.cost, ' s')} "
            f"({choice_text(best.group, options)}); "
            f"{times_text(cheapest.cost, ' s')} are enough for "
            f"{text(cheapest.score, unit)} ({choice_text(cheapest.group, options)})"
            f"{doubt}."
        )
