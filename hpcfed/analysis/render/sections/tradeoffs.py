"""The cost of a score: time and bytes to a target accuracy, privacy, and the frontier
of points that no other point beats in both score and cost.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import isfinite, nan
from statistics import fmean

from hpcfed.analysis.choices import Combination, grouped
from hpcfed.analysis.contests import Frontier, Weighed, frontiers
from hpcfed.analysis.findings import MEBIBYTES, PLAIN, TIME, Cell, Row, Table
from hpcfed.analysis.groups import Group
from hpcfed.analysis.labels import ACCURACIES, condition_text, label, text
from hpcfed.analysis.outcomes import (
    COSTS,
    Measure,
    measure,
    measures,
    run_epsilon,
    to_target,
)
from hpcfed.analysis.render.charts import (
    Axis,
    Drawing,
    Line,
    ScatterPoint,
    scatter,
    spread,
)
from hpcfed.analysis.render.sections.accuracy import MOST_FAMILIES, chart_families
from hpcfed.analysis.render.sections.section import (
    LOG_SPREAD,
    Section,
    estimates_line,
    line_charts,
    plain_points,
    points_table,
)
from hpcfed.analysis.statistics import Estimate, of_seeds
from hpcfed.analysis.swept import Swept, choice_text
from hpcfed.errors import count
from hpcfed.options.privacy import PrivacyOptions
from hpcfed.results.target import Reached
from hpcfed.words import DASH

NOISE = (*PrivacyOptions.__annotations__, "sampling")
"""Options that affect a run's privacy; --sampling is one of them."""
MOST_PROBLEMS = 3
"""Most problems with charts; the table has all of them."""
MOST_NAMED = 5
"""Most points of a frontier that the text names."""


def target(every: Sequence[Group]) -> Section:
    """Show rounds, seconds on both clocks, and bytes until a target was reached, and
    from which round on it was held.
    """
    section = Section("target", "Time to target")
    aimed = [group for group in every if group.first.target is not None]
    if not aimed:
        return section
    section.text.append(
        "Means over the seeds that reached the target accuracy, or stay there: those "
        "that do not would need a guess. A run stays at its "
        "target from the first evaluation on after which none is below it; one that "
        "ended when it reached the target does not know. Seconds are means over repeats, "
        "too."
    )
    there = [_known(run.reached() for run in group.seeds) for group in aimed]
    staying = [_known(run.stays() for run in group.seeds) for group in aimed]
    columns: dict[str, Sequence[str | Cell]] = {
        "target, %": [f"{group.first.target:g}" for group in aimed],
        "accuracy of": [ACCURACIES[group.first.judged_series] for group in aimed],
        "seeds that reached it": _of_seeds(aimed, there),
        "rounds": [_mean_rounds(seeds) for seeds in there],
        "seeds that stay": _stay_texts(aimed, staying),
        "stay from round": [_mean_rounds(seeds) for seeds in staying],
    }
    spent = {"seconds": ("seconds", PLAIN), "MiB sent": ("bytes", MEBIBYTES)}
    if any(group.first.has_clock for group in every):
        spent["virtual time"] = ("virtual_seconds", TIME)
        section.text.append(
            "Seconds are the simulation's; virtual time is the clients'."
        )
    for title, (name, kind) in spent.items():
        every_value = [to_target(group, name) for group in aimed]
        means = [fmean(values) if values else nan for values in every_value]
        columns[title] = list(map(kind, means))
    section.tables.append(points_table(aimed, columns))
    return section


def _known(seeds: Iterable[Reached | None]) -> list[Reached]:
    return [one for one in seeds if one is not None]


def _of_seeds(aimed: Sequence[Group], some: Sequence[Sequence[Reached]]) -> list[str]:
    """Return `2 of 3` for each group."""
    pairs = zip(aimed, some, strict=True)
    return [f"{len(seeds)} of {len(group.seeds)}" for group, seeds in pairs]


def _stay_texts(aimed: Sequence[Group], some: Sequence[Sequence[Reached]]) -> list[str]:
    texts = _of_seeds(aimed, some)
    for number, group in enumerate(aimed):
        if any(run.ended_at_target for run in group.seeds):
            texts[number] = "unknown: ended there"
    return texts


def _mean_rounds(seeds: Sequence[Reached]) -> Cell:
    numbers = [float(one.rounds) for one in seeds]
    return PLAIN(of_seeds(numbers) if numbers else Estimate(nan))


def privacy(every: Sequence[Group]) -> Section:
    """Show what privacy costs, if some run has it."""
    section = Section("privacy", "Accuracy against privacy")
    private = [group for group in every if _is_private(group)]
    if not private:
        return section
    section.text.append(
        "ε is what a run has spent after its last round, by its accountant and at its δ; "
        "less is more private. Dashed lines are runs without noise. Bars are 95 % "
        "confidence over seeds."
    )
    larger = ("privacy_population", "noise_cohort")
    if any(group.options.get(name) for group in private for name in larger):
        section.text.append(
            "With --privacy-population or --noise-cohort, ε is that of a federation of "
            "this size."
        )
    if any(group.options.get("privacy") == "local" for group in private):
        section.text.append(
            "With local noise, ε is that of the client that took part most often."
        )
    families = chart_families(every)
    for about in list(families)[:MOST_FAMILIES]:
        section.charts += _privacy_charts(about, families[about])
    section.tables.append(_privacy_table(every, private))
    return section


def _epsilon(group: Group) -> float:
    return run_epsilon(group).centre


def _is_private(group: Group) -> bool:
    return isfinite(_epsilon(group))


def _without_noise(every: Sequence[Group]) -> dict[Combination, Group]:
    """Return the points without noise, by all their options but those of noise."""
    return plain_points(every, lambda group: not _is_private(group), NOISE)


def _privacy_charts(about: str, members: Sequence[Group]) -> Iterator[Drawing]:
    """Draw the members' main metric over the ε that they have spent."""
    spent = [_epsilon(group) for group in members if _is_private(group)]
    if not spent:
        return
    x = Axis("ε", log=spread(spent) > LOG_SPREAD)
    for judged in measures(members):
        drawn = _lines(members, judged, ends=(min(spent), max(spent)))
        # A single point without a reference shows nothing.
        if sum(len(line.x) for line in drawn) > 1:
            title = f"{about}: {judged.whose}"
            yield from line_charts(title, drawn, x, Axis(judged.axis))


def _lines(
    members: Sequence[Group], judged: Measure, *, ends: tuple[float, float]
) -> list[Line]:
    """Return a line over ε for points that differ only in noise, each followed by a
    dashed one for the same without noise.
    """
    known = [one for one in members if isfinite(judged.estimate(one).centre)]
    beside = _without_noise(known)
    # Central and local noise have separate lines.
    others = [name for name in NOISE if name != "privacy"]
    private = sorted(filter(_is_private, known), key=_epsilon)
    found = grouped(private, lambda group: group.options.without(*others))
    kinds = {str(choice["privacy"]) for choice in found}
    drawn, compared = [], {}
    for some in found.values():
        name = label(some[0].key.without(*NOISE, "dataset"))
        if len(kinds) > 1:
            name += f", {some[0].options['privacy']}"
        spent = [_epsilon(group) for group in some]
        scores = [judged.estimate(group) for group in some]
        drawn.append(estimates_line(name, spent, scores))
        plain = beside.get(some[0].options.without(*NOISE))
        if plain is not None:
            level = judged.estimate(plain).centre
            title = f"{label(plain.key.only(['method']))} without noise"
            compared[title] = Line(title, ends, [level, level], ideal=True)
    return [*drawn, *compared.values()]


def _privacy_table(every: Sequence[Group], private: Sequence[Group]) -> Table:
    """Return ε, and its cost compared with the same point without noise."""
    deltas = [group.first.facts.get("delta") for group in private]
    norms = [fmean(run.last("clip_norm") for run in one.seeds) for one in private]
    columns: dict[str, Sequence[str | Cell]] = {
        "noise": [str(group.options.get("privacy", "")) for group in private],
        "ε": [PLAIN(_epsilon(group)) for group in private],
        "δ": [DASH if delta is None else f"{delta:.2g}" for delta in deltas],
        "clipped to": [PLAIN(norm) for norm in norms],
    }
    judged = measure(every)
    if judged is None:
        return points_table(private, columns)
    beside = _without_noise(every)
    scores = [judged.kind(judged.estimate(group)) for group in private]
    lost = []
    for group in private:
        plain = beside.get(group.options.without(*NOISE))
        gain = Estimate(nan) if plain is None else judged.gain(plain, group)
        lost.append(judged.kind(gain))
    columns |= {judged.axis: scores, "lost by noise": lost}
    return points_table(private, columns, judged.whose)


def pareto(every: Sequence[Group], options: Sequence[Swept]) -> Section:
    """Show score against seconds, bytes and energy, and the best of each."""
    section = Section("pareto", "Score against cost")
    found = frontiers(every, options)
    if not found:
        return section
    problems = list(dict.fromkeys(one.problem for one in found))
    section.text.append(
        "The dashed steps are the Pareto frontier: by the means, no point is both cheaper "
        "and better. Bars are 95 % confidence, of scores over seeds and of times over "
        "runs: points whose bars overlap may be in another order. Costs are of a whole "
        "run. Points compete if they have the same data, clients and attackers."
    )
    for one in found:
        costs = {point.cost.centre for point in one.points}
        scores = {point.score.centre for point in one.points}
        # If all points have the same value, there is nothing to choose.
        several = len(costs) > 1 and len(scores) > 1
        if one.problem in problems[:MOST_PROBLEMS] and several:
            section.charts.append(_frontier_chart(one, options))
            section.text.append(_named(one, options))
    if len(problems) > MOST_PROBLEMS:
        left = count(len(problems) - MOST_PROBLEMS, "more problem")
        section.text.append(f"Charts show the first problems. The table has {left}.")
    section.tables.append(_frontier_table(found, options))
    return section


def _frontier_chart(one: Frontier, options: Sequence[Swept]) -> Drawing:
    points = []
    # By method, so that a method has the same colour in all charts.
    for point in sorted(one.points, key=_method):
        points.append(
            ScatterPoint(
                x=point.cost.centre,
                y=point.score.centre,
                name=choice_text(point.group, options),
                series=_method(point),
                x_ends=(point.cost.low, point.cost.high),
                y_ends=(point.score.low, point.score.high),
            )
        )
    corners = [(point.cost.centre, point.score.centre) for point in one.best]
    # The last step extends to the most expensive point, which it beats.
    corners.append((one.points[-1].cost.centre, corners[-1][1]))
    costs = [point.cost.centre for point in one.points]
    return scatter(
        f"{one.judged.name} against {one.cost.name}: {condition_text(one.problem)}",
        points,
        Axis(one.cost.axis, log=spread(costs) > LOG_SPREAD),
        Axis(one.judged.axis),
        frontier=corners,
    )


def _method(point: Weighed) -> str:
    # By label, as in all other charts: a method's file has a path, which would sort
    # first.
    return label(point.group.options.only(["method"]))


def _named(one: Frontier, options: Sequence[Swept]) -> str:
    """Return the sentence that names the frontier, cheapest first."""
    names = []
    for point in one.best[:MOST_NAMED]:
        score = text(point.score, one.judged.unit)
        names.append(f"{choice_text(point.group, options)} ({score})")
    left = len(one.best) - len(names)
    if left:
        names.append(f"and {left} more")
    where = condition_text(one.problem)
    return f"{where}, by {one.cost.name}, cheapest first: {'; '.join(names)}."


def _frontier_table(found: Sequence[Frontier], options: Sequence[Swept]) -> Table:
    """Return all points on a frontier, and on which."""
    best_by: dict[int, list[str]] = defaultdict(list)
    points: dict[int, tuple[Frontier, Group]] = {}
    for one in found:
        for point in one.best:
            # By identity: groups are not compared by value.
            best_by[id(point.group)].append(one.cost.name.removesuffix(" of a run"))
            points[id(point.group)] = (one, point.group)
    known = {one.cost.name for one in found}
    costs = [cost for cost in COSTS.values() if cost.name in known]
    rows: list[Row] = []
    for identity, (one, group) in points.items():
        names = [condition_text(one.problem), choice_text(group, options)]
        score = one.judged.kind(one.judged.estimate(group))
        spent = [PLAIN(cost.of(group)) for cost in costs]
        rows.append([*names, score, *spent, ", ".join(best_by[identity])])
    head = ("problem", "point", "score", *(cost.axis for cost in costs), "best by")
    return Table(head, rows, "points on a frontier")
