"""What lay between clients and server in a run: its virtual clock, and its privacy.

Runs without them have none of this.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import isnan

import numpy as np

from hpcfed.analysis.curves import curve
from hpcfed.analysis.findings import Table
from hpcfed.analysis.groups import Group
from hpcfed.analysis.outcomes import measures
from hpcfed.analysis.render.charts import Axis, Drawing, lines
from hpcfed.analysis.render.run_page.learning import ROUNDS
from hpcfed.analysis.render.sections.section import Section
from hpcfed.analysis.render.sections.spending import VIRTUAL_TIME, climb_of
from hpcfed.analysis.render.show import privacy_text
from hpcfed.results.run import RunRecord
from hpcfed.words import number, time_text

Times = Mapping[str, np.ndarray]
"""What every member of every round took, by the column of the clock's table; may be
empty.
"""
PARTS = {
    "downloads": "download",
    "local steps": "train",
    "uploads": "upload",
}
"""What a member's time goes to, and its column."""
COVERED = (
    "ε covers the rows that the server makes of uploads, round by round, and what is made "
    "of them; by local noise, the uploads. It does not cover what is counted from clients "
    "as they are: accuracy and loss, who took part, arrived or was excluded, norms, bytes "
    "and virtual time; nor an end of the run that followed from them. Every run and every "
    "seed on the same data spends its own ε."
)
"""What ε of a run's page is about."""
COVERED_BY_DP_SGD = (
    "ε is that of one sample of one client, in the eyes of whoever sees what its client "
    "sends. It covers what clients learn by local training, and not accuracy and loss, "
    "which are counted from their data as it is. Every run and every seed on the same data "
    "spends its own ε."
)
SHARES = {"tenth": 0.1, "median": 0.5, "nine tenths": 0.9, "most": 1.0}
"""Columns of a distribution, and the share of members that are faster."""


def virtual_time(group: Group, times: Times) -> Section:
    """Show accuracy by the virtual clock, what rounds and clients took, and who arrived."""
    section = Section("virtual-time", "Virtual time")
    run = group.first
    if not run.has_clock:
        return section
    section.charts += _learning(group)
    durations = [_round_seconds(one) for one in group.seeds]
    unit, size = VIRTUAL_TIME.unit(float(np.nanmax(durations[0])))
    axis = f"virtual time of a round, {unit}"
    section.charts += _over_rounds(axis, durations, scale=1 / size)
    shares = [_arrived(one) for one in group.seeds]
    section.charts += _over_rounds("uploads that arrived, %", shares, scale=100)
    stale = [one.rounds["staleness"] for one in group.seeds]
    section.charts += _over_rounds("versions that uploads were behind", stale)
    section.tables.append(_clock_table(run))
    section.tables += _members_table(times)
    return section


def _learning(group: Group) -> list[Drawing]:
    """Draw what the run is judged by over virtual time, unless that is one point."""
    unit, size = VIRTUAL_TIME.unit(group.first.last("virtual_seconds"))
    judged = measures([group])
    curves = []
    for one in judged:
        curve = climb_of(group, one, VIRTUAL_TIME, size=size)
        if len(curve.x) > 1:
            curves.append(replace(curve, name=one.whose))
    if not curves:
        return []
    x = Axis(f"virtual time, {unit}")
    title = f"{judged[0].name} over virtual time"
    return [lines(title, curves, x, Axis(judged[0].axis))]


def _round_seconds(run: RunRecord) -> np.ndarray:
    """Return the virtual seconds of every round by itself."""
    return np.diff(run.rounds["virtual_seconds"], prepend=0.0)


def _arrived(run: RunRecord) -> np.ndarray:
    """Return the share of every round's participants whose uploads counted."""
    cohort = run.rounds["cohort"]
    nobody = np.full(len(cohort), np.nan)
    return np.divide(run.rounds["arrived"], cohort, out=nobody, where=cohort > 0)


def _over_rounds(
    axis: str, by_seed: list[np.ndarray], *, scale: float = 1.0
) -> list[Drawing]:
    """Draw a series over rounds; nothing where it never changes."""
    drawn = curve("", by_seed, scale=scale)
    if len(set(drawn.y)) < 2:
        return []
    title = axis.partition(",")[0]
    return [lines(title, [drawn], ROUNDS, Axis(axis, zero=True))]


def _clock_table(run: RunRecord) -> Table:
    seconds = _round_seconds(run)
    rows = [["all rounds", time_text(run.last("virtual_seconds"))]]
    for name, share in (("shortest", 0.0), ("median", 0.5), ("longest", 1.0)):
        rows.append([f"{name} round", time_text(float(np.nanquantile(seconds, share)))])
    arrived = run.arrived_share()
    if not isnan(arrived):
        rows.append(["uploads that arrived", f"{arrived:.1%}"])
    staleness = run.mean("staleness")
    if not isnan(staleness):
        rows.append(["versions that an upload was behind", number(staleness)])
    return Table(("by the virtual clock", ""), rows)


def _members_table(times: Times) -> list[Table]:
    """Return how the seconds of members are spread, over all rounds; nothing of runs
    that have not recorded them, as those without rounds.
    """
    spent = {name: times.get(column, np.empty(0)) for name, column in PARTS.items()}
    parts = np.array(list(spent.values()))
    # An upload that never came took no time that somebody knows of.
    came = np.isfinite(parts).all(0)
    if not came.any():
        return []
    spent["in all"] = parts.sum(0)
    rows = []
    for name, seconds in spent.items():
        ends = np.quantile(seconds[came], list(SHARES.values()))
        rows.append([name, *(time_text(float(end)) for end in ends)])
    caption = "virtual time of a client in a round, over all uploads that came"
    return [Table(("", *SHARES), rows, caption)]


def privacy(group: Group) -> Section:
    """Show the privacy spent round by round, and the norm that updates are clipped to."""
    section = Section("privacy", "Privacy")
    spent = [run.rounds["epsilon"] for run in group.seeds]
    section.charts += _over_rounds("ε spent", spent)
    norms = [run.rounds["clip_norm"] for run in group.seeds]
    section.charts += _over_rounds("norm that updates are clipped to", norms)
    rows = []
    text = privacy_text(group.first)
    if text:
        rows.append(["spent", text])
    clip_norm = group.first.last("clip_norm")
    if not isnan(clip_norm):
        rows.append(["updates clipped to the norm", number(clip_norm)])
    if rows:
        section.tables.append(Table(("privacy", ""), rows))
    if text and group.options.get("sample_noise") is not None:
        section.text.append(COVERED_BY_DP_SGD)
    elif text:
        section.text.append(COVERED)
    elif rows:
        section.text.append("Updates were clipped, and no noise was added: no ε holds.")
    return section
