"""Findings: tables of raw values. Each value knows how it is written.

Terminal, page, JSON and CSV render the same tables (`render/`), so a figure is computed
and named once, and reads the same wherever it stands. A kind makes cells:

    Table(("accuracy", "last"), [["clients, own test data", PERCENT(0.9375)]])
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, isnan, nan
from typing import Any

from hpcfed import words
from hpcfed.analysis.statistics import Estimate

MOST_ROWS = 30
"""Rows of a table that stand on a page at once."""


@dataclass(frozen=True)
class Kind:
    """A kind of figure: the unit of its raw values, and how people read them."""

    unit: str
    write: words.Write
    scale: float = 1.0
    """What a raw value is multiplied with to be written: 1e3 of seconds in ms."""

    def __call__(
        self, value: float | Estimate, text: str = "", *, error: float = nan
    ) -> "Cell":
        """Make a cell of a value. A text replaces the one that its kind would write, as
        where a second figure stands behind the first.
        """
        return Cell(value, self, text, error)


@dataclass(frozen=True)
class Cell:
    """A raw value in a table, with its kind."""

    value: float | Estimate
    kind: Kind
    told: str = ""
    error: float = nan
    """The standard error of a mean, if it is one."""

    def __str__(self) -> str:
        """Return what terminal and page show."""
        if self.told:
            return self.told
        kind = self.kind
        if isinstance(self.value, Estimate):
            return words.interval(self.value, kind.scale, kind.write)
        return kind.write(kind.scale * self.value)

    @property
    def number(self) -> float:
        """The value alone, by which columns are sorted."""
        value = self.value
        return value.centre if isinstance(value, Estimate) else value

    @property
    def json(self) -> dict[str, Any]:
        """The raw value and its unit, with null for what is not known."""
        found: dict[str, Any] = {"value": _known(self.number), "unit": self.kind.unit}
        if isinstance(self.value, Estimate) and self.value.bounded:
            found |= {"low": _known(self.value.low), "high": _known(self.value.high)}
        if not isnan(self.error):
            found["standard_error"] = _known(self.error)
        return found


def _known(value: float) -> float | None:
    # JSON has neither NaN nor infinity. Counts stay whole numbers.
    if not isfinite(value):
        return None
    return int(value) if isinstance(value, int) else float(value)


COUNT = Kind("1", words.formatted(",.0f"))
PLAIN = Kind("1", words.number)
"""A figure without a unit, or whose column names it."""
HUNDREDTHS = Kind("1", words.formatted(".2f"))
THOUSANDTHS = Kind("1", words.formatted(".3f"))
PERCENT = Kind("fraction", words.formatted(".2%"))
SHARE = Kind("fraction", words.formatted(".1%"))
"""A part of a whole, with one decimal."""
PER_CENT_OF = Kind("fraction", words.number, 100)
"""A fraction in a column whose name says %."""
OF_100 = Kind("%", words.number)
"""A figure that is in per cent already, as scores are, in a column that says %."""
SECONDS = Kind("s", words.formatted(".2f"))
WALL_TIME = Kind("s", words.formatted(".2f", " s"))
"""Seconds in a column whose name does not say so."""
MILLISECONDS = Kind("s", words.formatted(".2f"), 1e3)
MS = Kind("s", words.number, 1e3)
"""Seconds in a column whose name says ms."""
TIME = Kind("s", words.time_text)
BYTES = Kind("bytes", words.bytes_text)
MEBIBYTES = Kind("bytes", words.number, 1 / words.MIB)
"""Bytes in a column whose name says MiB."""
JOULES = Kind("J", words.formatted(",.0f", " J"))
FLOP = Kind("1", words.flops_text)

Row = Sequence[str | Cell]


@dataclass(frozen=True)
class Table:
    """Findings below each other. The first column names them."""

    columns: Sequence[str]
    rows: Sequence[Row]
    caption: str = ""
    """What a reader should know about the figures."""
    words: bool = False
    """Whether the cells hold words, which stand to the left, instead of numbers."""

    @property
    def long(self) -> bool:
        """Whether it would take a page over, and scrolls by itself instead."""
        return len(self.rows) > MOST_ROWS

    @property
    def texts(self) -> list[list[str]]:
        """The rows as people read them."""
        return [[str(cell) for cell in row] for row in self.rows]

    @property
    def json(self) -> dict[str, Any]:
        """The same rows as JSON values: names as they are, figures with their units."""
        rows = [
            [cell.json if isinstance(cell, Cell) else cell for cell in row]
            for row in self.rows
        ]
        return {"columns": list(self.columns), "rows": rows, "caption": self.caption}
