"""Pareto frontiers: score against seconds, bytes and energy."""

from collections.abc import Sequence

from hpcfed.analysis.findings import Table
from hpcfed.analysis.groups import Group
from hpcfed.analysis.labels import label
from hpcfed.analysis.outcomes import COSTS
from hpcfed.analysis.pareto import Frontier, Weighed, frontiers
from hpcfed.analysis.render.charts import Axis, Drawing, Point, scatter, spread
from hpcfed.analysis.render.sections.section import LOG_SPREAD, Section
from hpcfed.analysis.swept import Swept, swept
from hpcfed.analysis.verdicts import choice_text, condition_text, text
from hpcfed.errors import count
from hpcfed.words import interval

MOST_PROBLEMS = 3
"""Problems that have charts; the table has all of them."""
MOST_NAMED = 5
"""Points of a frontier that the text names."""


def pareto(every: Sequence[Group]) -> Section:
    section = Section("pareto", "Score against cost")
    options = swept(every)
    found = frontiers(every, options)
    if not found:
        return section
    problems = list(dict.fromkeys(one.problem for one in found))
    section.text.append(
        "The dashed steps are the Pareto frontier: nobody is both cheaper and better, "
        "by the means. Bars are 95 % confidence, of scores over seeds and of times over "
        "runs: points whose bars overlap may be in another order. Costs are of a whole "
        "run; points compete within the same data, clients and attackers."
    )
    for one in found:
        costs = {point.cost.centre for point in one.points}
        scores = {point.score.centre for point in one.points}
        # What is the same for all leaves nothing to choose.
        several = len(costs) > 1 and len(scores) > 1
        if one.problem in problems[:MOST_PROBLEMS] and several:
            section.charts.append(_chart(one, options))
            section.text.append(_named(one, options))
    if len(problems) > MOST_PROBLEMS:
        left = count(len(problems) - MOST_PROBLEMS, "more problem")
        section.text.append(f"Charts show the first problems; {left} in the table.")
    section.tables.append(_table(found, options))
    return section


def _chart(one: Frontier, options: Sequence[Swept]) -> Drawing:
    points = []
    # By method, so that a method has the same colour in all charts.
    for point in sorted(one.points, key=_method):
        points.append(
            Point(
                x=point.cost.centre,
                y=point.score.centre,
                name=choice_text(point.group, options),
                series=_method(point),
                x_ends=(point.cost.low, point.cost.high),
                y_ends=(point.score.low, point.score.high),
            )
        )
    corners = [(point.cost.centre, point.score.centre) for point in one.best]
    # The last step goes on to the dearest point, which it is better than.
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
    # By its label, as all other charts: a method's file has a path, which sorts first.
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


def _table(found: Sequence[Frontier], options: Sequence[Swept]) -> Table:
    """Return every point that is on a frontier, and on which."""
    rows = []
    on: dict[int, list[str]] = {}
    points: dict[int, tuple[Frontier, Group]] = {}
    for one in found:
        for point in one.best:
            on.setdefault(id(point.group), []).append(
                one.cost.name.removesuffix(" of a run")
            )
            points[id(point.group)] = (one, point.group)
    known = {one.cost.name for one in found}
    costs = [cost for cost in COSTS.values() if cost.name in known]
    for identity, (one, group) in points.items():
        rows.append(
            [
                condition_text(one.problem),
                choice_text(group, options),
                interval(one.judged.estimate(group)),
                *(interval(cost.of(group)) for cost in costs),
                ", ".join(on[identity]),
            ]
        )
    head = ("problem", "point", "score", *(cost.axis for cost in costs), "best by")
    return Table(head, rows, "points on a frontier")
