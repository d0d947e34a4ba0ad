"""Curves over what runs spend while they learn: virtual time, or bytes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np

from hpcfed.analysis.curves import Climb, curve_over
from hpcfed.analysis.groups import Group
from hpcfed.analysis.labels import label
from hpcfed.analysis.outcomes import Measure, measures, metric_limits
from hpcfed.analysis.render.charts import Axis, Drawing, Line, lines, spread
from hpcfed.analysis.render.sections.accuracy import (
    MOST_CURVES,
    MOST_FAMILIES,
    chart_families,
    told_apart,
)
from hpcfed.analysis.render.sections.section import (
    LOG_SPREAD,
    MOST_LINES,
    Section,
    batches,
    held_text,
)
from hpcfed.analysis.swept import Swept, held
from hpcfed.options.metrics import metric_of
from hpcfed.results.run import RunRecord

READING = (
    "A curve is the mean over seeds, each on straight lines between its evaluations; it "
    "begins where all seeds have a value, and ends with the first that ends."
)
"""How to read these curves."""


@dataclass(frozen=True)
class Expense:
    """Something that a run spends, round by round."""

    name: str
    of: Callable[[RunRecord], np.ndarray]
    """What a run has spent after every round."""
    units: Sequence[tuple[str, float]]
    """Units with their sizes, the smallest first."""
    log: bool = False
    """Whether the axis is logarithmic in any case."""

    def unit(self, most: float) -> tuple[str, float]:
        """Return the largest unit of which there are at least two."""
        fitting = self.units[0]
        for unit in self.units:
            if most >= 2 * unit[1]:
                fitting = unit
        return fitting


def add_charts(
    section: Section,
    every: Sequence[Group],
    options: Sequence[Swept],
    spending: Expense,
) -> None:
    """Draw what the task is judged by over what runs have spent, a few charts for each
    data set.
    """
    families = chart_families(every)
    for about, family in islice(families.items(), MOST_FAMILIES):
        shown = held(family, options, keep=("ranks",), most=MOST_CURVES)
        section.text += held_text(shown)
        section.charts += climbs(about, shown.groups, spending)
    left_out = list(families)[MOST_FAMILIES:]
    if left_out:
        section.text.append(f"Without curves here: {'; '.join(left_out)}.")


def climbs(
    about: str, members: Sequence[Group], spending: Expense
) -> Iterator[Drawing]:
    """Draw what members are judged by over what they have spent."""
    ends = [_end(group, spending) for group in members]
    unit, size = spending.unit(max(ends))
    log = spending.log or spread(ends) > LOG_SPREAD
    x = Axis(f"{spending.name}, {unit}", log=log)
    for judged in measures(members):
        climb = partial(climb_of, judged=judged, spending=spending, size=size, log=log)
        curves = told_apart(members, climb)
        # A single evaluation is in the tables already.
        if max((len(curve.x) for curve in curves), default=0) > 1:
            for some in batches(curves, MOST_LINES):
                title = f"{about}: {judged.whose}"
                yield lines(title, some, x, Axis(judged.axis))


def _end(group: Group, spending: Expense) -> float:
    """Return the most that a seed has spent in the end."""
    return max(float(np.nanmax(spending.of(run))) for run in group.seeds)


def climb_of(
    group: Group,
    judged: Measure,
    spending: Expense,
    *,
    size: float,
    log: bool = False,
) -> Line:
    """Return what a group is judged by over what it has spent, in units of this size."""
    least, most = metric_limits(metric_of(judged.series))
    seeds = []
    for run in group.seeds:
        if judged.series in run.rounds:
            seeds.append(Climb(spending.of(run), run.rounds[judged.series]))
    return curve_over(
        label(group.key.without("dataset")),  # which the chart's title has
        seeds,
        scale=judged.scale,
        across=1 / size,
        log=log,
        least=least,
        most=most,
    )
