"""Entries of a paper's tables: ours beside what it prints, and how near they are."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import NamedTuple

from benchmarks.paper.measures import Measure
from benchmarks.paper.study import Printed
from hpcfed.errors import count


@dataclass(frozen=True)
class Entry:
    """One cell of a table."""

    values: Sequence[float] | None
    """The measure of every seed; None where the cell has none."""
    figure: Printed | None
    measure: Measure
    stopped_at: int | None = None
    unknown: bool = False
    """Whether runs ended too early to have it."""
    seeds: tuple[int, ...] = ()
    """The seeds that it is of."""
    paired: bool = False
    """Whether values are differences of two methods, seed by seed."""

    @property
    def known(self) -> list[float]:
        return [value for value in self.values or () if not math.isnan(value)]

    @property
    def counts(self) -> bool:
        """Whether it can be held against the paper: what it took to reach the target
        first does not change any more, anything else waits for the end of the run.
        """
        if self.figure is None or self.values is None or self.unknown:
            return False
        if not self.measure.to_target:
            return bool(self.known) and self.stopped_at is None
        for_good = len(self.known) == len(self.values) and not self.measure.stays
        return self.stopped_at is None or for_good

    def __str__(self) -> str:
        text = mean_text(self.values, self.measure, paired=self.paired)
        if self.unknown:
            text = "unknown: ended there"
        # A measure of all seeds together says so in its title.
        elif self.known and self.measure.pooled is None:
            text += FEW_SEEDS.get(len(self.seeds), "")
        if self.stopped_at is not None:
            text += f" at round {self.stopped_at}"
        if self.figure is None:
            return text
        return f"{text} ({_number(self.figure.value, self.measure, self.paired)})"


FEW_SEEDS = {1: ", one seed", 2: ", two seeds"}
"""What stands beside a mean of fewer than three seeds."""


def _number(value: float, measure: Measure, paired: bool = False) -> str:
    unit = "x" if measure.relative else ""
    sign = "+" if paired else ""
    return f"{value:{sign}.{measure.digits}f}{unit}"


def mean_text(
    values: Sequence[float] | None, measure: Measure, *, paired: bool = False
) -> str:
    """Return the mean over seeds and its standard error."""
    if values is None:
        return "–"
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "never" if measure.to_target else "–"
    text = _number(mean(known), measure, paired)
    if len(known) > 1:
        error = stdev(known) / math.sqrt(len(known))
        text += f" ± {error:.{measure.digits}f}"
    if len(known) < len(values):
        text += f", {len(known)} of {count(len(values), 'seed')}"
    return text


class Nearness(NamedTuple):
    """How many entries are near to the paper."""

    near: int
    with_error: int
    """Entries for which the paper prints an error."""
    within: int
    """Those of them that lie within it."""


def count_near(entries: Sequence[Entry]) -> Nearness:
    """Count the entries that are near to the paper; each has a figure."""
    near = with_error = within = 0
    for entry in entries:
        if entry.figure is None or not entry.known:
            continue
        ours, paper = mean(entry.known), entry.figure
        near += entry.measure.near.holds(ours, paper.value)
        if paper.error is not None:
            with_error += 1
            within += abs(ours - paper.value) <= paper.error
    return Nearness(near, with_error, within)


def near_text(entries: Sequence[Entry]) -> str:
    """Say how many of a table's entries are near to the paper.

    All have the same measure, a value and a figure. Only figures that the paper prints
    with an error can lie within it.
    """
    near, counted, texts = entries[0].measure.near, count_near(entries), []
    if counted.with_error:
        within = f"{counted.within} of {counted.with_error}"
        texts.append(f"within the paper's error: {within}")
    texts.append(f"{near.text}: {counted.near} of {len(entries)}")
    never = sum(not entry.known for entry in entries)
    if never:
        never_so = "held" if entries[0].measure.stays else "reached"
        texts.append(f"never {never_so}: {never}")
    return "; ".join(texts)
