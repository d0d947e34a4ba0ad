"""Noise: points whose times should be measured again, and how."""

from collections.abc import Sequence
from math import isnan

from hpcfed.analysis.findings import Table
from hpcfed.analysis.groups import Group
from hpcfed.analysis.noise import MOST_DRIFT, MOST_VARIATION, Noise, noisy
from hpcfed.analysis.render.sections.section import WHICH, Section, which
from hpcfed.errors import count
from hpcfed.words import number

COLUMNS = (
    *WHICH,
    "runs",
    "repeats differ, %",
    "training drifts within a run, %",
)
ENOUGH = 5
"""Repeats of a point that show how noisy a machine is."""


def noise(every: Sequence[Group]) -> Section:
    section = Section("noise", "Noise of the machine")
    found = noisy(every)
    if not found:
        return section
    section.text.append(
        f"Listed where the medians of repeats have a coefficient of variation above "
        f"{100 * MOST_VARIATION:.0f} % and differ by more than their own rounds do, or "
        f"where local training became more than {100 * MOST_DRIFT:.0f} % slower or "
        "faster from the first to the last third of a run."
    )
    section.text.append(
        f"To trust these times: {_repeat(found)}, take "
        "the node for yourself (sbatch --exclusive), and pin ranks to cores (srun "
        "--cpu-bind=cores, mpirun --bind-to core). Accuracies do not depend on it."
    )
    section.tables.append(Table(COLUMNS, [_row(one) for one in found]))
    return section


def _repeat(found: Sequence[Noise]) -> str:
    """Return what to do about repeats; there may be some already."""
    fewest = min(len(one.group.processes) for one in found)
    if fewest < ENOUGH:
        return f"raise repeats in the study file to {ENOUGH}"
    return "measure these points again"


def _row(one: Noise) -> list[str]:
    percents = [number(100 * value) for value in (one.variation, one.drift)]
    return [*which(one.group), str(len(one.group.processes)), *percents]


def noise_warnings(every: Sequence[Group]) -> list[str]:
    """Return the line for the top of the page, if the machine was not quiet."""
    found = noisy(every)
    if not found:
        return []
    worst = max(found, key=lambda one: 0.0 if isnan(one.variation) else one.variation)
    name, clients, ranks = which(worst.group)
    return [
        f"The machine was not quiet: the times of {len(found)} of "
        f"{count(len(every), 'point')} cannot be trusted, most of all those of {name}, "
        f"{clients} clients on {count(int(ranks), 'rank')}. See the section on noise."
    ]
