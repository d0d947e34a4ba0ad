"""Verdicts of a study: one for each question that its points can answer, in sentences.

A question without an answer has no verdict.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

from hpcfed import plugins
from hpcfed.analysis.choices import SIZES, Combination
from hpcfed.analysis.contests import Contest, Frontier, contests, frontiers
from hpcfed.analysis.costmodel import Fitted, fit_groups
from hpcfed.analysis.groups import Group, fewest_ranks
from hpcfed.analysis.labels import label, option_text, value_text
from hpcfed.analysis.limits import Limit, limits, profiled
from hpcfed.analysis.outcomes import (
    COSTS,
    Measure,
    mean_to_target,
    measure,
    run_bytes,
)
from hpcfed.analysis.scaling import Growth, Scaling, growths, scalings
from hpcfed.analysis.statistics import Estimate, of_runs, of_seeds, ratio
from hpcfed.analysis.swept import (
    PROBLEM,
    Effect,
    Swept,
    families,
    problem,
    score_effect,
    swept,
    time_effect,
)
from hpcfed.errors import count
from hpcfed.words import MIB, number, time_text

MOST_SENTENCES = 4
"""For one question; what is beyond is counted, and stands in the section's table."""
MOST_LETTERS = 48
"""Letters of a word in a sentence."""
LONG_WORD = re.compile(rf"\S{{{MOST_LETTERS + 1},}}")
LEAST_ERROR = 0.001
"""Relative error of a time below which its digits mean nothing."""
SAME_BYTES = 0.02
"""Relative difference up to which two methods send as much."""
MOST_SPREAD = 4.0
"""How many times its lower end the upper end of an interval of times may be, so that it
is worth printing.
"""
IN_PERCENT = (" %", " points")
"""Units of which people read one digit after the point."""


@dataclass(frozen=True)
class Verdict:
    question: str
    answers: list[str]
    """Whole sentences."""
    section: str
    """Where on the page the figures are."""


def verdicts(every: Sequence[Group]) -> list[Verdict]:
    """Answer every question that the points can answer."""
    options = swept(every)
    scaled = scalings(every)
    strong = [one for one in scaled if one.kind == "strong"]
    weak = [one for one in scaled if one.kind == "weak"]
    weighed = frontiers(every, options)
    asked = [
        Verdict("Which method wins where?", _wins(contests(every, options)), "methods"),
        Verdict("Which options matter?", _matters(every, options), "options"),
        Verdict("How does it scale over ranks?", _strong(strong), "scaling"),
        Verdict("And with as many clients on every rank?", _weak(weak), "scaling"),
        Verdict("How does it scale by clients?", _clients(growths(every)), "clients"),
        Verdict("What limits it?", _limited(every, options), "phases"),
        Verdict(
            "What does it cost?",
            _costs(every, weighed, options),
            "pareto" if weighed else "target",
        ),
        Verdict("Can times be predicted?", _predicted(fit_groups(every)), "model"),
    ]
    answered = [verdict for verdict in asked if verdict.answers]
    return [_readable(verdict) for verdict in answered]


def _readable(verdict: Verdict) -> Verdict:
    """Cut words that nobody reads: names of files may be long."""
    cut = []
    for line in verdict.answers:
        cut.append(LONG_WORD.sub(lambda found: f"{found[0][:MOST_LETTERS]}…", line))
    return replace(verdict, answers=cut)


def vague(estimate: Estimate) -> bool:
    """Tell whether an interval of times is too wide to say anything, as that of two
    repeats on a busy machine.
    """
    low, high = estimate.low, estimate.high
    return estimate.bounded and (low <= 0 or high > MOST_SPREAD * low)


def times_text(estimate: Estimate, unit: str = "", scale: float = 1.0) -> str:
    """Return a figure that follows from times as `text` does, but without an interval
    that says nothing.
    """
    if not vague(estimate):
        return text(estimate, unit, scale)
    alone = text(Estimate(estimate.centre), unit, scale)
    return f"{alone} (by the mean; too few repeats for an interval)"


def text(estimate: Estimate, unit: str = "", scale: float = 1.0) -> str:
    """Return `12.3 % [11.8, 12.9]`, as it stands in a sentence."""
    write = _percent if unit in IN_PERCENT else number
    words = f"{write(scale * estimate.centre)}{unit}"
    if estimate.bounded:
        low, high = write(scale * estimate.low), write(scale * estimate.high)
        words += f" [{low}, {high}]"
    return words


def _percent(value: float) -> str:
    return f"{value:,.1f}"


def _first(sentences: Sequence[str], of: str) -> list[str]:
    """Return the first sentences, and how many more there would be."""
    shown = list(sentences[:MOST_SENTENCES])
    left = len(sentences) - len(shown)
    if left:
        shown.append(f"{count(left, of)} more in the table.")
    return shown


# Methods.


def condition_text(condition: Combination) -> str:
    """Return `digits, 20 clients, alpha 0.1`, as far as it has them."""
    words = []
    for name, value in condition.items():
        if name == "dataset":
            words.append(plugins.label(str(value)))
        elif name == "clients":
            words.append(count(int(value), "client"))
        elif value is not None:  # which methods have that lack the option
            words.append(option_text(name, value))
    return ", ".join(words)


def entrant_text(contest: Contest, group: Group) -> str:
    """Return the method, with those of its own options that were swept."""
    return label(group.options.only(("method", *contest.own)))


def _wins(found: Sequence[Contest]) -> list[str]:
    if len(found) <= MOST_SENTENCES:
        return [_contest(contest) for contest in found]
    return _wins_counted(found)


def _contest(contest: Contest) -> str:
    where = condition_text(contest.condition)
    best = entrant_text(contest, contest.winner)
    score = text(contest.judged.estimate(contest.winner), contest.judged.unit)
    second = entrant_text(contest, contest.ranking[1])
    lead = text(contest.leads[0], contest.judged.steps)
    if contest.decided:
        return f"{where}: {best} wins with {score}, {lead} ahead of {second}."
    if contest.leads[0].centre == 0:
        return f"{where}: {best} and {second} are equal, with {score}."
    if contest.seeds < 2:
        return (
            f"{where}: {best} is ahead with {score}, {lead} before {second}; "
            "one seed cannot tell whether that is noise."
        )
    rivals = " and ".join(entrant_text(contest, rival) for rival in contest.rivals)
    return (
        f"{where}: {best} is ahead with {score}, but {rivals} "
        f"{_are(contest.rivals)} not told apart from it by {contest.seeds} seeds; "
        f"its lead over {second} is {lead}."
    )


def _are(things: Sequence[object]) -> str:
    return "is" if len(things) == 1 else "are"


def _wins_counted(found: Sequence[Contest]) -> list[str]:
    """Sum up many contests, and tell the clearest of them."""
    decided = [contest for contest in found if contest.decided]
    wins = Counter(entrant_text(contest, contest.winner) for contest in decided)
    words = [f"{name} wins {times}" for name, times in wins.most_common(MOST_SENTENCES)]
    undecided = len(found) - len(decided)
    if undecided:
        fewest = min(contest.seeds for contest in found)
        words.append(f"{undecided} are not told apart by {count(fewest, 'seed')}")
    sentences = [f"Of {count(len(found), 'condition')}, {', '.join(words)}."]
    if decided:
        clearest = max(decided, key=lambda contest: contest.leads[0].centre)
        sentences.append(f"The largest lead: {_contest(clearest)}")
    ahead = Counter(entrant_text(contest, contest.winner) for contest in found)
    name, times = ahead.most_common(1)[0]
    sentences.append(
        f"By the means alone, {name} is ahead most often: {times} of {len(found)} times."
    )
    return sentences


# Options.


@dataclass(frozen=True)
class Matters:
    """What one option does to score and time."""

    option: Swept
    score: Effect | None
    time: Effect | None


def effects(every: Sequence[Group], options: Sequence[Swept]) -> list[Matters]:
    """Return what every option but the method does, the strongest on the score first."""
    judged = measure(every)
    # Points on other ranks are no pairs of their own: their accuracy is the same.
    once = fewest_ranks(every)
    others = [option for option in options if option.name != "ranks"]
    found = []
    for option in options:
        if option.name == "method":
            continue
        score = None
        if judged is not None and option.name != "ranks":
            score = score_effect(families(once, option.name, others), option, judged)
        alike = families(every, option.name, options)
        found.append(Matters(option, score, time_effect(alike, option)))

    def strength(one: Matters) -> float:
        return 0.0 if one.score is None else -abs(one.score.change.centre)

    return sorted(found, key=strength)


def _matters(every: Sequence[Group], options: Sequence[Swept]) -> list[str]:
    """Tell what options do: first those whose effect is sure, then those of which there
    are too few seeds, and last the names of those whose effect may be noise.
    """
    judged = measure(every)
    sure, single, noise = [], [], []
    for one in effects(every, options):
        if one.score is None or judged is None:
            continue
        change = one.score.change
        if change.centre == 0 or not isfinite(change.centre):
            continue
        opposite = _opposite(every, options, one.score, judged)
        if opposite:
            sure.append(opposite)
        elif not change.bounded:
            told = _effect(one.score, judged)
            single.append(f"{told}; too few seeds or pairs to tell it from noise.")
        elif change.low <= 0:
            noise.append(one.option.name)
        else:
            sure.append(f"{_effect(one.score, judged)}.")
    sentences = _first([*sure, *single], "option")
    if noise:
        sentences.append(f"No effect could be told from noise: {', '.join(noise)}.")
    return sentences


def _effect(effect: Effect, judged: Measure) -> str:
    name = effect.option.name
    best, worst = value_text(name, effect.best), value_text(name, effect.worst)
    gain = text(effect.change, judged.steps)
    pairs = count(effect.pairs, "pair")
    return (
        f"{name}: {best} is {gain} of {judged.name} better than {worst}, over {pairs} of "
        "points that differ in nothing else"
    )


def _opposite(
    every: Sequence[Group], options: Sequence[Swept], effect: Effect, judged: Measure
) -> str:
    """Return the sentence of an option that helps one method and harms another, each
    surely; empty where no two methods disagree.
    """
    name = effect.option.name
    helped, harmed = [], []
    for method, change in _by_method(every, options, effect, judged).items():
        if not change.bounded:
            continue
        if change.low > 0:
            helped.append(f"{method} ({text(change, judged.steps)})")
        elif change.high < 0:
            harmed.append(f"{method} ({text(change, judged.steps)})")
    if not (helped and harmed):
        return ""
    best, worst = value_text(name, effect.best), value_text(name, effect.worst)
    return (
        f"{name}: {best} instead of {worst} helps {' and '.join(helped)} and harms "
        f"{' and '.join(harmed)}."
    )


def _by_method(
    every: Sequence[Group], options: Sequence[Swept], effect: Effect, judged: Measure
) -> dict[str, Estimate]:
    """Return what the best value of an option does for every method, in place of the
    worst: from seeds where a method has one pair of points, from pairs where it has
    several.
    """
    name = effect.option.name
    others = [option for option in options if option.name != "ranks"]
    gains: dict[str, list[Estimate]] = defaultdict(list)
    for choice, members in families(fewest_ranks(every), name, others).items():
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


# Ranks and clients.


def _largest(found: Sequence[Scaling]) -> list[Scaling]:
    """Return every choice's scaling with most clients."""
    best: dict[Combination, Scaling] = {}
    for one in found:
        known = best.get(one.key)
        if known is None or one.clients > known.clients:
            best[one.key] = one
    return list(best.values())


def _strong(found: Sequence[Scaling]) -> list[str]:
    largest = _largest(found)
    if len(largest) <= MOST_SENTENCES:
        return [_speedup(one) for one in largest]
    ordered = sorted(largest, key=lambda one: one.efficiency[-1].centre)
    efficiencies = [one.efficiency[-1].centre for one in ordered]
    return [
        f"The efficiency on the most ranks is {_range(efficiencies, 100)} % over "
        f"{count(len(ordered), 'choice')} of options.",
        f"Best: {_speedup(ordered[-1])}",
        f"Worst: {_speedup(ordered[0])}",
    ]


def _range(values: Sequence[float], scale: float = 1.0) -> str:
    """Return `60 to 72`, or a single number where they are alike."""
    least, most = number(scale * min(values)), number(scale * max(values))
    return least if least == most else f"{least} to {most}"


def _speedup(one: Scaling) -> str:
    where = f"{label(one.key)}, {one.clients:,.0f} clients"
    speedup, efficiency = one.speedup[-1], one.efficiency[-1]
    ranks = count(one.ranks[-1], "rank")
    if vague(speedup):
        return (
            f"{where}: too few repeats to tell whether {ranks} are faster than "
            f"{one.ranks[0]} ({number(speedup.centre)} times as fast by the mean)."
        )
    return (
        f"{where}: {ranks} are {text(speedup, ' times')} as fast as {one.ranks[0]}, an "
        f"efficiency of {times_text(efficiency, ' %', 100)}{_no_gain(one)}."
    )


def _no_gain(one: Scaling) -> str:
    """Add a word where more ranks do not help."""
    last = one.speedup[-1]
    if last.bounded and last.low <= 1 <= last.high:
        return "; that is no gain that could be told from noise"
    if last.centre < 1:
        return "; more ranks are slower"
    return ""


def _weak(found: Sequence[Scaling]) -> list[str]:
    largest = _largest(found)
    if len(largest) > MOST_SENTENCES:
        efficiencies = [one.efficiency[-1].centre for one in largest]
        return [
            f"The efficiency on the most ranks is {_range(efficiencies, 100)} % over "
            f"{count(len(largest), 'choice')} of options."
        ]
    sentences = []
    for one in largest:
        # Weak scaling's efficiency is how much longer a round takes, turned round.
        sentences.append(
            f"{label(one.key)}, {one.clients:g} clients per rank: from {one.ranks[0]} "
            f"to {count(one.ranks[-1], 'rank')} the efficiency is "
            f"{times_text(one.efficiency[-1], ' %', 100)}."
        )
    return _first(sentences, "choice")


def _clients(found: Sequence[Growth]) -> list[str]:
    if len(found) <= MOST_SENTENCES:
        return [_growth(one) for one in found]
    ordered = sorted(found, key=lambda one: one.power.centre)
    powers = [one.power.centre for one in ordered]
    return [
        f"A round's time grows as clients to the power of {_range(powers)} over "
        f"{count(len(ordered), 'choice')} of options and ranks; 1 would be in "
        "proportion.",
        f"Least: {_growth(ordered[0])}",
        f"Most: {_growth(ordered[-1])}",
    ]


def _growth(one: Growth) -> str:
    where = f"{label(one.key)}, {count(one.ranks, 'rank')}"
    sizes = f"from {one.clients[0]:,} to {one.clients[-1]:,} clients"
    if vague(one.longer):
        return (
            f"{where}: too few repeats to tell how the time of a round grows {sizes} "
            f"({number(one.longer.centre)} times as long by the mean)."
        )
    first, last = one.per_client[0], one.per_client[-1]
    return (
        f"{where}: {sizes} a round takes {text(one.longer, ' times')} as long, clients "
        f"to the power of {text(one.power)}; a client costs {number(1e3 * first)} ms, "
        f"then {number(1e3 * last)} ms."
    )


# Limits, costs, predictions.


def _limited(every: Sequence[Group], options: Sequence[Swept]) -> list[str]:
    profiles = []
    for group, part in profiled(every):
        profiles.append(f"Profile of {point_text(group, options)}: {part.words}.")
    return [*_limits(limits(every), options), *_first(profiles, "profile")]


def _limits(found: Sequence[Limit], options: Sequence[Swept]) -> list[str]:
    phases = {limit.phase for limit in found}
    alike = len(phases) == 1 and all(limit.loss is None for limit in found)
    if len(found) > 1 and alike and phases != {"server"}:
        shares = [limit.share for limit in found]
        return [
            f"{phases.pop()} takes most of a round everywhere, {_range(shares, 100)} %; "
            "hpcfed profile tells what limits it."
        ]
    if len(found) <= MOST_SENTENCES:
        return [_limit(limit, options) for limit in found]
    # Many choices are often limited by the same.
    by_phase: dict[str, list[Limit]] = defaultdict(list)
    for limit in found:
        by_phase[limit.phase].append(limit)
    sentences = []
    for phase, members in sorted(by_phase.items(), key=lambda item: -len(item[1])):
        shares = [limit.share for limit in members]
        sentences.append(
            f"{phase} takes most of a round in {len(members)} of "
            f"{count(len(found), 'choice')} of options: {_range(shares, 100)} %."
        )
    lossy = [limit for limit in found if limit.loss is not None]
    if lossy:
        worst = max(lossy, key=lambda limit: limit.loss.after if limit.loss else 0.0)
        sentences.append(f"Most is lost to more ranks here: {_limit(worst, options)}")
    return sentences


def _limit(limit: Limit, options: Sequence[Swept]) -> str:
    where = point_text(limit.group, options)
    words = f"{where}: {limit.phase} takes {100 * limit.share:.0f} % of a round"
    if limit.phase == "server" and limit.group.first.learns_seldom:
        # A training of the server's model is no part of a usual round.
        share = f"{100 * limit.share:.0f} % of the run"
        words = f"{where}: server {limit.group.first.server_text()}, {share}"
    if limit.loss is not None:
        loss = limit.loss
        words += (
            f"; against {count(loss.ranks, 'rank')} most is lost in {loss.phase}, "
            f"{number(1e3 * loss.before)} ms there and {number(1e3 * loss.after)} ms "
            "here"
        )
    return f"{words}."


def _costs(
    every: Sequence[Group], found: Sequence[Frontier], options: Sequence[Swept]
) -> list[str]:
    methods = _first(_dearer(contests(every, options)), "method")
    targets = _first(list(_to_target(every, options)), "problem")
    ends = _first(list(_ends(found, options)), "problem")
    sentences = [*methods, *targets, *ends]
    energies = [group for group in every if isfinite(_energy(group))]
    if len(energies) > 1:
        least, most = min(energies, key=_energy), max(energies, key=_energy)
        sentences.append(
            f"A run's GPUs take from {number(_energy(least))} J "
            f"({point_text(least, options)}) to {number(_energy(most))} J "
            f"({point_text(most, options)})."
        )
    return sentences


def _dearer(found: Sequence[Contest]) -> list[str]:
    """Tell how much longer a round of each method takes than that of the fastest, over
    the conditions that both were run under.
    """
    by_method: dict[str, list[tuple[Combination, Group]]] = defaultdict(list)
    for contest in found:
        for group in contest.ranking:
            by_method[entrant_text(contest, group)].append((contest.condition, group))
    times = {name: of_runs(_seconds(points)) for name, points in by_method.items()}
    ordered = sorted(times, key=lambda name: times[name].centre)
    sentences = []
    for name in ordered[1:]:
        base = dict(by_method[ordered[0]])
        pairs = [(one, base[where]) for where, one in by_method[name] if where in base]
        if not pairs:
            continue
        slower = _over_pairs(
            [ratio(one.seconds, other.seconds) for one, other in pairs]
        )
        sent = [
            run_bytes(one).centre / run_bytes(other).centre
            for one, other in pairs
            if run_bytes(other).centre
        ]
        sentence = f"A round of {name} takes {times_text(slower, ' times')} as long as "
        sentence += f"one of {ordered[0]}"
        if sent and abs(of_runs(sent).centre - 1) > SAME_BYTES:
            sentence += f" and sends {number(of_runs(sent).centre)} times the bytes"
        sentences.append(f"{sentence}.")
    return sentences


def _seconds(points: Sequence[tuple[Combination, Group]]) -> list[float]:
    return [group.seconds.centre for _, group in points]


def _over_pairs(ratios: Sequence[Estimate]) -> Estimate:
    """Return a ratio over several pairs of points; of one pair, as its repeats tell it.

    Pairs that agree by chance say nothing where the repeats of one are far apart.
    """
    if len(ratios) == 1:
        return ratios[0]
    together = of_runs([one.centre for one in ratios])
    loose = [one for one in ratios if vague(one)]
    if not loose:
        return together
    return Estimate(together.centre, loose[0].low, loose[0].high)


def _energy(group: Group) -> float:
    return COSTS["energy"].of(group).centre


def point_text(group: Group, options: Sequence[Swept]) -> str:
    """Return the options of a point, and its size as far as sizes differ."""
    sizes = {option.name for option in options} & set(SIZES)
    words = [label(group.key)]
    if "clients" in sizes:
        words.append(count(group.clients, "client"))
    if "ranks" in sizes:
        words.append(count(group.ranks, "rank"))
    return ", ".join(words)


def _to_target(every: Sequence[Group], options: Sequence[Swept]) -> Iterator[str]:
    """Tell who reaches a target first, and who with fewest bytes, in each problem."""
    problems: dict[tuple[Combination, float], list[Group]] = defaultdict(list)
    for group in every:
        target = group.first.target
        if target is not None:
            problems[problem(group, options), target].append(group)
    for (posed, target), members in problems.items():
        about = f"{condition_text(posed)}, target {target:g} %"
        reached = [m for m in members if isfinite(mean_to_target(m, "seconds"))]
        if not reached:
            yield f"{about}: no point reached it with all its seeds."
        elif len(members) > 1:
            yield f"{about}: {_reached(reached, options)}."


def _reached(reached: Sequence[Group], options: Sequence[Swept]) -> str:
    """Tell the fastest and, if it is another one, who has sent least."""
    fastest = min(reached, key=lambda group: mean_to_target(group, "seconds"))
    leanest = min(reached, key=lambda group: mean_to_target(group, "bytes"))
    seconds = number(mean_to_target(fastest, "seconds"))
    mib = number(mean_to_target(leanest, "bytes") / MIB)
    told = f"{choice_text(fastest, options)} is first, after {seconds} s"
    if fastest.key == leanest.key:
        told += f", and with fewest bytes, {mib} MiB"
    else:
        told += f"; {choice_text(leanest, options)} with fewest bytes, {mib} MiB"
    clocked = [one for one in reached if isfinite(_virtual(one))]
    if clocked:
        first = min(clocked, key=_virtual)
        when = time_text(_virtual(first))
        told += f"; {choice_text(first, options)} first in virtual time, after {when}"
    return told


def _virtual(group: Group) -> float:
    return mean_to_target(group, "virtual_seconds")


def choice_text(group: Group, options: Sequence[Swept]) -> str:
    """Return a point's options without the problem, which the sentence has already."""
    name = label(group.key.without(*PROBLEM))
    if any(option.name == "ranks" for option in options):
        name += f", {count(group.ranks, 'rank')}"
    return name


def _ends(found: Sequence[Frontier], options: Sequence[Swept]) -> Iterator[str]:
    """Tell how much the best point of each problem costs, and what less gives."""
    for one in found:
        if one.cost is not COSTS["seconds"] or len(one.best) < 2:
            continue
        cheapest, best = one.best[0], one.best[-1]
        # Times that noise may have put in order are not told as a price.
        if _overlap(cheapest.cost, best.cost):
            continue
        unit = one.judged.unit
        yield (
            f"{condition_text(one.problem)}: the best {one.judged.name}, "
            f"{text(best.score, unit)}, takes {times_text(best.cost, ' s')} "
            f"({choice_text(best.group, options)}); "
            f"{times_text(cheapest.cost, ' s')} are enough for "
            f"{text(cheapest.score, unit)} ({choice_text(cheapest.group, options)})."
        )


def _overlap(one: Estimate, other: Estimate) -> bool:
    """Whether both have intervals, and these have something in common."""
    if not (one.bounded and other.bounded):
        return False
    return one.low <= other.high and other.low <= one.high


def _predicted(found: Sequence[Fitted]) -> list[str]:
    if len(found) <= MOST_SENTENCES:
        return [_model(one) for one in found]
    errors = [max(one.model.error, LEAST_ERROR) for one in found]
    sentences = [
        f"{len(found)} cost models are wrong by {_range(errors, 100)} % on the points "
        "that they were fitted to."
    ]
    checked = [one for one in found if one.held_out is not None]
    if checked:
        worst = max(
            checked, key=lambda one: abs(one.held_out.error if one.held_out else 0)
        )
        sentences.append(f"Worst on its largest point: {_model(worst)}")
    return sentences


def _error(error: float) -> str:
    """Return a relative error in per cent; times are not known to a thousandth."""
    if error < LEAST_ERROR:
        return f"less than {100 * LEAST_ERROR:g} %"
    return f"{number(100 * error)} %"


def _model(one: Fitted) -> str:
    sentence = (
        f"{label(one.key)}: the cost model is wrong by "
        f"{_error(one.model.error)} on the points it was fitted to"
    )
    if isfinite(one.model.left_out_error):
        left_out = _error(one.model.left_out_error)
        sentence += f", by {left_out} on points that it has not seen"
    if one.held_out is not None:
        point = one.held_out.point
        error = 100 * one.held_out.error
        sentence += (
            f"; the largest ({point.clients:,.0f} clients on "
            f"{count(point.ranks, 'rank')}) it would have put {error:+.3g} % off"
        )
    return f"{sentence}."
