"""Accuracy over what runs spend while they learn: virtual time, or bytes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import isnan, nan
from statistics import fmean

import numpy as np

from hpcfed.analysis.curves import Climb, curve_over
from hpcfed.analysis.findings import MEBIBYTES, PER_CENT_OF, PLAIN, TIME, Cell, Table
from hpcfed.analysis.groups import Group
from hpcfed.analysis.labels import label
from hpcfed.analysis.outcomes import (
    Measure,
    measure,
    measures,
    metric_limits,
    run_virtual_seconds,
)
from hpcfed.analysis.render.charts import Axis, Drawing, Line, spread
from hpcfed.analysis.render.sections.accuracy import add_charts, told_apart
from hpcfed.analysis.render.sections.section import (
    LOG_SPREAD,
    Section,
    line_charts,
    plain_points,
    points_table,
)
from hpcfed.analysis.swept import Swept
from hpcfed.options.compression import CompressionOptions
from hpcfed.options.metrics import metric_of
from hpcfed.results.run import RunRecord

READING = (
    "A curve is the mean over seeds, each on straight lines between its evaluations. It "
    "begins where all seeds have a value, and ends where the first seed ends."
)
"""How to read these curves."""
COMPRESSORS = ("compress", "compress_down")
"""Options that choose the compression of uploads and downloads."""
PACKING = tuple(CompressionOptions.__annotations__)
"""These, and the options of compressors."""
BYTES = (("KiB", 2.0**10), ("MiB", 2.0**20), ("GiB", 2.0**30), ("TiB", 2.0**40))


@dataclass(frozen=True)
class Expense:
    """Something that a run spends, round by round."""

    name: str
    of: Callable[[RunRecord], np.ndarray]
    """What a run has spent after each round."""
    units: Sequence[tuple[str, float]]
    """Units with their sizes, smallest first."""
    log: bool = False
    """Whether the axis is always logarithmic."""

    def unit(self, most: float) -> tuple[str, float]:
        """Return the largest unit in which the amount is at least two."""
        fitting = self.units[0]
        for unit in self.units:
            if most >= 2 * unit[1]:
                fitting = unit
        return fitting


VIRTUAL_TIME = Expense(
    "virtual time",
    lambda run: run.rounds["virtual_seconds"],
    units=(("s", 1.0), ("min", 60.0), ("h", 3600.0)),
)
UP = Expense(
    "sent by clients", lambda run: np.nancumsum(run.rounds["bytes_up"]), BYTES, log=True
)
BOTH = Expense(
    "sent by and to clients", lambda run: np.nancumsum(run.sent), BYTES, log=True
)


def climbs(
    about: str, members: Sequence[Group], *, expense: Expense
) -> Iterator[Drawing]:
    """Draw the members' main metric over what they have spent."""
    # The most that a seed has spent at its end.
    ends = [
        max(float(np.nanmax(expense.of(run))) for run in group.seeds)
        for group in members
    ]
    unit, size = expense.unit(max(ends))
    log = expense.log or spread(ends) > LOG_SPREAD
    x = Axis(f"{expense.name}, {unit}", log=log)
    for judged in measures(members):
        climb = partial(climb_of, judged=judged, expense=expense, size=size, log=log)
        curves = told_apart(members, climb)
        # A single evaluation is already in the tables.
        if max((len(curve.x) for curve in curves), default=0) > 1:
            title = f"{about}: {judged.whose}"
            yield from line_charts(title, curves, x, Axis(judged.axis))


def climb_of(
    group: Group, judged: Measure, expense: Expense, *, size: float, log: bool = False
) -> Line:
    """Return a group's main metric over what it has spent, in units of this size."""
    least, most = metric_limits(metric_of(judged.series))
    seeds = []
    for run in group.seeds:
        if judged.series in run.rounds:
            seeds.append(Climb(expense.of(run), run.rounds[judged.series]))
    return curve_over(
        label(group.key.without("dataset")),  # already in the chart's title
        seeds,
        scale=judged.metric.scale,
        across=1 / size,
        log=log,
        least=least,
        most=most,
    )


def clock(every: Sequence[Group], options: Sequence[Swept]) -> Section:
    """Show accuracy on the clients' clock and who arrived, for runs with a clock."""
    section = Section("virtual-time", "Accuracy over virtual time")
    clocked = [group for group in every if group.first.has_clock]
    if not clocked:
        return section
    section.text.append(
        "Virtual time is that of the simulated devices and links. It has nothing to do "
        f"with the seconds that the simulation took. {READING}"
    )
    add_charts(section, clocked, options, partial(climbs, expense=VIRTUAL_TIME))

    def of_round(run: RunRecord) -> float:
        return run.last("virtual_seconds") / run.rounds_done

    columns = {
        "virtual time": [TIME(run_virtual_seconds(group).centre) for group in clocked],
        "a round": [TIME(_mean_of_seeds(group, of_round)) for group in clocked],
    }
    # Arrivals and staleness, if a run has recorded them.
    behind = partial(RunRecord.mean, name="staleness")
    arrived = [_mean_of_seeds(group, RunRecord.arrived_share) for group in clocked]
    staleness = [_mean_of_seeds(group, behind) for group in clocked]
    if not all(map(isnan, arrived)):
        columns["arrived, %"] = list(map(PER_CENT_OF, arrived))
    if not all(map(isnan, staleness)):
        columns["versions behind"] = list(map(PLAIN, staleness))
    section.tables.append(points_table(clocked, columns, "means over seeds"))
    return section


def _mean_of_seeds(group: Group, figure: Callable[[RunRecord], float]) -> float:
    """Return the mean over seeds that know a figure; NaN if none does."""
    values = [figure(run) for run in group.seeds]
    known = [value for value in values if not isnan(value)]
    return fmean(known) if known else nan


def compression(every: Sequence[Group], options: Sequence[Swept]) -> Section:
    """Show accuracy against bytes, if runs differ in compression."""
    section = Section("compression", "Accuracy against bytes")
    packed = [group for group in every if _packs(group)]
    if not packed or len({group.options.only(PACKING) for group in every}) < 2:
        return section
    section.text.append(
        "Bytes are those of packed uploads and downloads, of all clients together. "
        f"{READING}"
    )
    add_charts(section, every, options, partial(climbs, expense=UP))
    if any(_packs(group, "compress_down") for group in packed):
        add_charts(section, every, options, partial(climbs, expense=BOTH))
    section.tables.append(_compression_table(every))
    return section


def _packs(group: Group, *names: str) -> bool:
    """Tell whether one of these options names a compressor; by default check both."""
    chosen = [group.options.get(name, "none") for name in names or COMPRESSORS]
    return any(str(compressor) != "none" for compressor in chosen)


def _compression_table(every: Sequence[Group]) -> Table:
    """Return each point's score and bytes, and the reduction of bytes compared with the
    same point without compression.
    """
    # Majority vote is an aggregation rule, which costs no bytes.
    packing = (*PACKING, "aggregation")
    plain = plain_points(every, lambda group: not _packs(group), packing)

    def less(group: Group, *ways: str) -> Cell:
        beside = plain.get(group.options.without(*packing), group)
        sent = _bytes(group, *ways)
        known = beside is not group and sent
        return PLAIN(_bytes(beside, *ways) / sent if known else nan)

    up, down = "bytes_up", "bytes_down"
    columns: dict[str, list[Cell]] = {}
    caption = "bytes of a whole run, means over seeds"
    judged = measure(every)
    if judged is not None:
        columns[judged.axis] = [judged.kind(judged.estimate(group)) for group in every]
        caption = f"{judged.name}: {judged.whose}; {caption}"
    columns |= {
        "up, MiB": [MEBIBYTES(_bytes(group, up)) for group in every],
        "down, MiB": [MEBIBYTES(_bytes(group, down)) for group in every],
        "times less up": [less(group, up) for group in every],
        "times less in all": [less(group, up, down) for group in every],
    }
    return points_table(every, columns, caption)


def _bytes(group: Group, *ways: str) -> float:
    """Return the bytes of a run, as the mean over seeds."""
    return sum(
        fmean(float(np.nansum(run.rounds[way])) for run in group.seeds) for way in ways
    )
