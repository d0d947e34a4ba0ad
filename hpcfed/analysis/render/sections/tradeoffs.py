"""The cost of a score: time and bytes to a target accuracy, privacy, and the frontier
of points that no other point beats in both score and cost.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import isfinite, nan
from operator import attrgetter
from statistics import fmean

from hpcfed.analysis.choices import Combination, grouped
from hpcfed.analysis.contests import Frontier, Weighed, frontiers
from hpcfed.analysis.findings import (
    MEBIBYTES,
    PLAIN,
    TIME,
    Cell,
    Kind,
    Row,
    Table,
)
from hpcfed.analysis.groups import Group
from hpcfed.analysis.labels import condition_text, label, text
from hpcfed.analysis.outcomes import COSTS, Measure, measure, measures, run_epsilon
from hpcfed.analysis.render.charts import (
    Axis,
    Drawing,
    Line,
    ScatterPoint,
    lines,
    scatter,
    spread,
)
from hpcfed.analysis.render.sections.accuracy import MOST_FAMILIES, chart_families
from hpcfed.analysis.render.sections.section import (
    LOG_SPREAD,
    MOST_LINES,
    Section,
    batches,
    estimates_line,
    points_table,
)
from hpcfed.analysis.statistics import Estimate, of_seeds
from hpcfed.analysis.swept import Swept, choice_text
from hpcfed.errors import count
from hpcfed.options.privacy import PrivacyOptions
from hpcfed.results.run import Reached
from hpcfed.words import DASH

NOISE = (*PrivacyOptions.__annotations__, "sampling")
"""Options that affect a run's privacy; --sampling is one of them."""
MOST_PROBLEMS = 3
"""Most problems with charts; the table has all of them."""
MOST_NAMED = 5
"""Most points of a frontier that the text names."""


def target(every: Sequence[Group]) -> Section:
    """Show rounds, seconds on both clocks, and bytes until a target was reached."""
    section = Section("target", "Time to target")
    aimed = [group for group in every if group.first.target is not None]
    if not aimed:
        return section
    section.text.append("Means over the seeds that reached the target accuracy.")
    columns: dict[str, Callable[[Group], str | Cell]] = {
        "target, %": lambda group: f"{group.first.target:g}",
        "seeds that reached it": _seeds_there,
        "rounds": lambda group: PLAIN(_rounds_there(group)),
        "seconds": partial(_spent_there, name="seconds", kind=PLAIN),
        "MiB sent": partial(_spent_there, name="bytes", kind=MEBIBYTES),
    }
    if any(group.first.has_clock for group in every):
        columns["virtual time"] = partial(
            _spent_there, name="virtual_seconds", kind=TIME
        )
        section.text.append(
            "Seconds are the simulation's; virtual time is the clients'."
        )
    section.tables.append(points_table(aimed, columns))
    return section


def _there(group: Group) -> list[Reached]:
    """Return when seeds reached the target; the others would need a guess."""
    every = [run.reached() for run in group.seeds]
    return [one for one in every if one is not None]


def _seeds_there(group: Group) -> str:
    return f"{len(_there(group))} of {len(group.seeds)}"


def _rounds_there(group: Group) -> Estimate:
    rounds = [float(one.rounds) for one in _there(group)]
    return of_seeds(rounds) if rounds else Estimate(nan)


def _spent_there(group: Group, name: str, kind: Kind) -> Cell:
    spent = list(map(attrgetter(name), _there(group)))
    return kind(fmean(spent) if spent else nan)


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
    section.text += _remarks(private)
    families = chart_families(every)
    for about in list(families)[:MOST_FAMILIES]:
        section.charts += _privacy_charts(about, families[about])
    section.tables.append(_privacy_table(every, private))
    return section


def _remarks(private: Sequence[Group]) -> Iterator[str]:
    """Yield what else a reader has to know about ε."""
    larger = ("privacy_population", "noise_cohort")
    if any(group.options.get(name) for group in private for name in larger):
        yield (
            "With --privacy-population or --noise-cohort, ε is that of a federation of "
            "this size."
        )
    if any(group.options.get("privacy") == "local" for group in private):
        yield "With local noise, ε is that of the client that took part most often."


def _is_private(group: Group) -> bool:
    return isfinite(run_epsilon(group).centre)


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
            for some in batches(drawn, MOST_LINES):
                yield lines(f"{about}: {judged.whose}", some, x, Axis(judged.axis))


def _lines(
    members: Sequence[Group], judged: Measure, *, ends: tuple[float, float]
) -> list[Line]:
    """Return a line over ε for points that differ only in noise, each followed by a
    dashed one for the same without noise.
    """
    known = [one for one in members if isfinite(judged.estimate(one).centre)]
    beside = _without_noise(known)
    found = grouped(sorted(filter(_is_private, known), key=_epsilon), _line)
    kinds = {str(choice["privacy"]) for choice in found}
    drawn, compared = [], {}
    for some in found.values():
        name = label(some[0].key.without(*NOISE, "dataset"))
        if len(kinds) > 1:
            name += f", {some[0].options['privacy']}"
        spent = [_epsilon(group) for group in some]
        scores = [judged.estimate(group) for group in some]
        drawn.append(estimates_line(name, spent, scores))
        plain = beside.get(_otherwise(some[0]))
        if plain is not None:
            level = judged.estimate(plain).centre
            title = f"{label(plain.key.only(['method']))} without noise"
            compared[title] = Line(title, ends, [level, level], ideal=True)
    return [*drawn, *compared.values()]


def _epsilon(group: Group) -> float:
    return run_epsilon(group).centre


def _without_noise(every: Sequence[Group]) -> dict[Combination, Group]:
    """Return points without privacy, by what they have in common with private ones."""
    found: dict[Combination, Group] = {}
    for group in every:
        if not _is_private(group):
            found.setdefault(_otherwise(group), group)
    return found


def _line(group: Group) -> Combination:
    """Return what points on one line have in common: central and local noise have
    separate lines.
    """
    others = [name for name in NOISE if name != "privacy"]
    return group.options.without(*others)


def _otherwise(group: Group) -> Combination:
    return group.options.without(*NOISE)


def _privacy_table(every: Sequence[Group], private: Sequence[Group]) -> Table:
    """Return ε, and its cost compared with the same point without noise."""
    columns: dict[str, Callable[[Group], str | Cell]] = {
        "noise": lambda group: str(group.options.get("privacy", "")),
        "ε": lambda group: PLAIN(_epsilon(group)),
        "δ": _delta,
        "clipped to": lambda group: PLAIN(
            fmean(run.last("clip_norm") for run in group.seeds)
        ),
    }
    judged = measure(every)
    if judged is None:
        return points_table(private, columns)
    beside = _without_noise(every)
    kind, estimate, gain = judged.kind, judged.estimate, judged.gain

    def lost(group: Group) -> Cell:
        plain = beside.get(_otherwise(group))
        return kind(Estimate(nan) if plain is None else gain(plain, group))

    columns[judged.axis] = lambda group: kind(estimate(group))
    columns["lost by noise"] = lost
    return points_table(private, columns, judged.whose)


def _delta(group: Group) -> str:
    delta = group.first.facts.get("delta")
    return DASH if delta is None else f"{delta:.2g}"


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
        section.text.append(f"Charts show the first problems; {left} in the table.")
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
        rows.append(
            [
                condition_text(one.problem),
                choice_text(group, options),
                one.judged.kind(one.judged.estimate(group)),
                *(PLAIN(cost.of(group)) for cost in costs),
                ", ".join(best_by[identity]),
            ]
        )
    head = ("problem", "point", "score", *(cost.axis for cost in costs), "best by")
    return Table(head, rows, "points on a frontier")
