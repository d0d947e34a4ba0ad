"""Privacy: accuracy against ε, beside the same without noise."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import isfinite, nan
from statistics import fmean

from hpcfed.analysis.choices import Combination
from hpcfed.analysis.findings import Table
from hpcfed.analysis.groups import Group
from hpcfed.analysis.labels import label
from hpcfed.analysis.outcomes import Measure, measure, measures, run_epsilon
from hpcfed.analysis.render.charts import Axis, Drawing, Line, lines, spread
from hpcfed.analysis.render.sections.accuracy import MOST_FAMILIES, chart_families
from hpcfed.analysis.render.sections.section import (
    LOG_SPREAD,
    MOST_LINES,
    WHICH,
    Section,
    batches,
    estimates_line,
    which,
)
from hpcfed.analysis.statistics import Estimate
from hpcfed.options.privacy import PrivacyOptions
from hpcfed.words import interval, number

NOISE = (*PrivacyOptions.__annotations__, "sampling")
"""Options that make a run more or less private; --sampling goes with them."""


def privacy(every: Sequence[Group]) -> Section:
    """Show what privacy costs, where some run has it."""
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
        section.charts += _charts(about, families[about])
    section.tables.append(_table(every, private))
    return section


def _remarks(private: Sequence[Group]) -> Iterator[str]:
    """Yield what else a reader has to know about ε."""
    larger = ("privacy_population", "noise_cohort")
    if any(group.options.get(name) for group in private for name in larger):
        yield (
            "With --privacy-population or --noise-cohort, ε is as if the federation "
            "were so large."
        )
    if any(group.options.get("privacy") == "local" for group in private):
        yield "By local noise, ε is that of the client which took part most often."


def _is_private(group: Group) -> bool:
    return isfinite(run_epsilon(group).centre)


def _charts(about: str, members: Sequence[Group]) -> Iterator[Drawing]:
    """Draw what members are judged by over the ε that they have spent."""
    spent = [_epsilon(group) for group in members if _is_private(group)]
    if not spent:
        return
    x = Axis("ε", log=spread(spent) > LOG_SPREAD)
    for judged in measures(members):
        drawn = _lines(members, judged, ends=(min(spent), max(spent)))
        # A single point with nothing beside it shows nothing.
        if sum(len(line.x) for line in drawn) > 1:
            for some in batches(drawn, MOST_LINES):
                yield lines(f"{about}: {judged.whose}", some, x, Axis(judged.axis))


def _lines(
    members: Sequence[Group], judged: Measure, *, ends: tuple[float, float]
) -> list[Line]:
    """Return a line over ε for points that differ in noise alone, each followed by a
    dashed one for the same without noise.
    """
    known = [one for one in members if isfinite(judged.estimate(one).centre)]
    beside = _without_noise(known)
    found: dict[Combination, list[Group]] = defaultdict(list)
    for group in sorted(filter(_is_private, known), key=_epsilon):
        found[_line(group)].append(group)
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
    """Return what points on one line have in common: central noise is not local."""
    others = [name for name in NOISE if name != "privacy"]
    return group.options.without(*others)


def _otherwise(group: Group) -> Combination:
    return group.options.without(*NOISE)


def _table(every: Sequence[Group], private: Sequence[Group]) -> Table:
    """Return ε, and what it costs beside the same without noise."""
    judged = measure(every)
    beside = _without_noise(every)
    rows = []
    for group in private:
        score = cost = Estimate(nan)
        if judged is not None:
            score = judged.estimate(group)
            plain = beside.get(_otherwise(group))
            if plain is not None:
                cost = judged.gain(plain, group)
        rows.append(
            [
                *which(group),
                str(group.options.get("privacy", "")),
                number(_epsilon(group)),
                _delta(group),
                number(fmean(run.last("clip_norm") for run in group.seeds)),
                interval(score),
                interval(cost),
            ]
        )
    scored = "score" if judged is None else judged.axis
    columns = (*WHICH, "noise", "ε", "δ", "clipped to", scored, "lost by noise")
    return Table(columns, rows, "" if judged is None else judged.whose)


def _delta(group: Group) -> str:
    delta = group.first.facts.get("delta")
    return "–" if delta is None else f"{delta:.2g}"
