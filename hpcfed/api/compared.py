"""A comparison of two runs or studies on disk, A and B."""

from collections.abc import Sequence
from html import escape
from os import PathLike
from typing import Any

from hpcfed.analysis.collect import find
from hpcfed.analysis.comparison.changes import Change
from hpcfed.analysis.comparison.comparison import Comparison, Figure
from hpcfed.analysis.comparison.comparison import compare as compare_groups
from hpcfed.analysis.comparison.shown import changed, verdicts
from hpcfed.analysis.groups import groups
from hpcfed.api.opened import path_of, table_of
from hpcfed.errors import UserError, remark


def compare(before: str | PathLike[str], after: str | PathLike[str]) -> "Compared":
    """Compare two folders; anything but a run or a study is a one-line error."""
    paths = [path_of(given, "hpcfed.compare") for given in (before, after)]
    sides = []
    for path in paths:
        found = find([path])
        for line in found.unread:
            remark(f"hpcfed: left out: {line}")
        sides.append(groups(found.processes))
    names = (str(paths[0]), str(paths[1]))
    comparison = compare_groups(names, *sides)
    if comparison is None:
        raise UserError(f"no runs of {names[0]} and {names[1]} have the same options")
    return Compared(comparison)


class Compared:
    """What changed from A to B, and its effect.

    Tables are DataFrames if pandas is installed, else numpy's structured arrays.
    """

    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison

    @property
    def verdicts(self) -> list[str]:
        """What a reader wants to know first, one sentence each."""
        return [changed(self._comparison), *verdicts(self._comparison)]

    @property
    def options(self) -> Any:
        """A row per option that changed: its values in A and B, and its default."""
        return _changes(self._comparison.options)

    @property
    def code(self) -> Any:
        """A row per version, file or machine that changed."""
        return _changes(self._comparison.code)

    @property
    def speed(self) -> Any:
        """Costs of a round: seconds, phases, memory, bytes, energy; `change`: B / A."""
        # Phases come right below the seconds that they are parts of.
        seconds, *others = self._comparison.costs
        figures = [seconds, *self._comparison.phases, *others]
        return table_of([_row(figure) for figure in figures])

    @property
    def accuracy(self) -> Any:
        """Accuracies after the last round, or the task's metric; `change` is B − A."""
        return table_of([_row(figure) for figure in self._comparison.headlines])

    @property
    def points(self) -> Any:
        """A row per figure of each point that both sides have: `change` of seconds and
        of accuracies, with the options that distinguish the point.
        """
        rows = []
        for point in self._comparison.points:
            about = dict(point.key) | {"clients": point.before.clients}
            about["ranks"] = point.before.ranks
            for figure in (point.seconds, *point.headlines):
                rows.append(about | _row(figure))
        return table_of(rows)

    def __repr__(self) -> str:
        return "\n".join(self.verdicts)

    def _repr_html_(self) -> str:
        """Show the verdicts in a notebook."""
        lines = [f"<li>{escape(line)}</li>" for line in self.verdicts]
        return f"<ul>{''.join(lines)}</ul>"


def _changes(changes: Sequence[Change]) -> Any:
    rows = []
    for one in changes:
        rows.append({"name": one.name, "a": one.before, "b": one.after})
        rows[-1]["default"] = one.default
    return table_of(rows, ("name", "a", "b", "default"))


def _row(figure: Figure) -> dict[str, Any]:
    return {
        "name": figure.name,
        "unit": figure.unit,
        "a": figure.before,
        "b": figure.after,
        "change": figure.change.centre,
        "low": figure.change.low,
        "high": figure.change.high,
        "told_apart": figure.told_apart,
    }
