"""Compression: accuracy against bytes, and how much less was sent than without."""

from collections.abc import Sequence
from math import nan
from statistics import fmean

import numpy as np

from hpcfed.analysis.choices import Combination
from hpcfed.analysis.findings import Table
from hpcfed.analysis.groups import Group
from hpcfed.analysis.outcomes import measure
from hpcfed.analysis.render.sections.section import WHICH, Section, which
from hpcfed.analysis.render.sections.spending import READING, Expense, add_charts
from hpcfed.analysis.swept import Swept
from hpcfed.options.compression import CompressionOptions
from hpcfed.results.run import RunRecord
from hpcfed.words import MIB, interval, number

COMPRESSORS = ("compress", "compress_down")
"""Options that say what packs uploads and downloads."""
PACKING = tuple(CompressionOptions.__annotations__)
"""These, and options of compressors."""
BYTES = (("KiB", 2.0**10), ("MiB", 2.0**20), ("GiB", 2.0**30), ("TiB", 2.0**40))


def _sent_up(run: RunRecord) -> np.ndarray:
    return np.nancumsum(run.rounds["bytes_up"])


def _sent_in_all(run: RunRecord) -> np.ndarray:
    return np.nancumsum(run.rounds["bytes_up"] + run.rounds["bytes_down"])


UP = Expense("sent by clients", _sent_up, BYTES, log=True)
BOTH = Expense("sent by and to clients", _sent_in_all, BYTES, log=True)


def compression(every: Sequence[Group], options: Sequence[Swept]) -> Section:
    """Show accuracy against bytes, where runs differ in compression."""
    section = Section("compression", "Accuracy against bytes")
    packed = [group for group in every if _packs(group)]
    if not packed or len({_packing(group) for group in every}) < 2:
        return section
    section.text.append(
        "Bytes are those of packed uploads and downloads, of all clients together. "
        f"{READING}"
    )
    add_charts(section, every, options, UP)
    if any(
        str(group.options.get("compress_down", "none")) != "none" for group in packed
    ):
        add_charts(section, every, options, BOTH)
    section.tables.append(_table(every))
    return section


def _packs(group: Group) -> bool:
    return any(str(group.options.get(name, "none")) != "none" for name in COMPRESSORS)


def _packing(group: Group) -> Combination:
    return group.options.only(PACKING)


def _table(every: Sequence[Group]) -> Table:
    """Return every point's score and bytes, and how many times less these are than
    those of the same point without compression.
    """
    plain: dict[Combination, Group] = {}
    for group in every:
        if not _packs(group):
            plain.setdefault(_otherwise(group), group)
    judged = measure(every)
    rows = []
    for group in every:
        up, down = _bytes(group, "bytes_up"), _bytes(group, "bytes_down")
        score = "–" if judged is None else interval(judged.estimate(group))
        beside = plain.get(_otherwise(group), group)
        plain_up, plain_down = _bytes(beside, "bytes_up"), _bytes(beside, "bytes_down")
        less = [_times(plain_up, up), _times(plain_up + plain_down, up + down)]
        if beside is group:
            less = [nan, nan]
        figures = [up / MIB, down / MIB, *less]
        rows.append([*which(group), score, *map(number, figures)])
    scored = "score" if judged is None else judged.axis
    columns = [*WHICH, scored, "up, MiB", "down, MiB"]
    columns += ["times less up", "times less in all"]
    caption = "bytes of a whole run, means over seeds"
    if judged is not None:
        caption = f"{judged.name}: {judged.whose}; {caption}"
    return Table(columns, rows, caption)


def _otherwise(group: Group) -> Combination:
    """Return what points have in common that differ in compression alone. Majority votes
    are a rule of aggregation, which costs no bytes.
    """
    return group.options.without(*PACKING, "aggregation")


def _bytes(group: Group, name: str) -> float:
    return fmean(float(np.nansum(run.rounds[name])) for run in group.seeds)


def _times(before: float, after: float) -> float:
    return before / after if after else nan
