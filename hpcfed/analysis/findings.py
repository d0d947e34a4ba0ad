"""Findings: tables of raw values. Each value knows its display format.

Terminal, page, JSON and CSV render the same tables (`render/`), so a figure is computed
and named once, and reads the same everywhere. A kind makes cells:

    Table(("accuracy", "last"), [["clients, own test data", PERCENT(0.9375)]])
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, isnan, nan
from typing import Any

from hpcfed import words
from hpcfed.analysis.statistics import Estimate

MOST_ROWS = 30
"""Most rows of a table that a page shows at once."""


@dataclass(frozen=True)
class Kind:
    """A kind of figure: the unit of its raw values, and how they are displayed."""

    unit: str
    write: words.Write
    scale: float = 1.0
    """Factor from a raw value to its display: 1e3 for seconds in ms."""

    def __call__(
        self, value: float | Estimate, text: str = "", *, error: float = nan
    ) -> "Cell":
        """Make a cell from a value. A text replaces the kind's own format, for example
        to add a second figure.
        """
        return Cell(value, self, text, error)


@dataclass(frozen=True)
class Cell:
    """A raw value in a table, with its kind."""

    value: float | Estimate
    kind: Kind
    told: str = ""
    error: float = nan
    """The standard error, if the value is a mean."""

    def __str__(self) -> str:
        """Return the text for terminal and page."""
        if self.told:
            return self.told
        kind = self.kind
        if isinstance(self.value, Estimate):
            return words.interval(self.value, kind.scale, kind.write)
        return kind.write(kind.scale * self.value)

    @property
    def number(self) -> float:
        """The bare value, by which columns are sorted."""
        value = self.value
        return value.centre if isinstance(value, Estimate) else value

    @property
    def json(self) -> dict[str, Any]:
        """The raw value and its unit, with null for unknown values."""
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
"""A figure without a unit, or whose column names the unit."""
HUNDREDTHS = Kind("1", words.formatted(".2f"))
THOUSANDTHS = Kind("1", words.formatted(".3f"))
PERCENT = Kind("fraction", words.formatted(".2%"))
SHARE = Kind("fraction", words.formatted(".1%"))
"""A part of a whole, with one decimal."""
PER_CENT_OF = Kind("fraction", words.number, 100)
"""A fraction in a column whose name says %."""
OF_100 = Kind("%", words.number)
"""A figure that is already in per cent, as scores are, in a column that says %."""
SECONDS = Kind("s", words.formatted(".2f"))
IN_SECONDS = Kind("s", words.number)
"""Seconds in a column whose name says s."""
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
    """A table of findings. The first column names them."""

    columns: Sequence[str]
    rows: Sequence[Row]
    caption: str = ""
    """What a reader should know about the figures."""
    words: bool = False
    """Whether the cells hold words, which are left-aligned, instead of numbers."""

    @property
    def long(self) -> bool:
        """Whether it would dominate a page, and scrolls separately instead."""
        return len(self.rows) > MOST_ROWS

    @property
    def texts(self) -> list[list[str]]:
        """The rows as displayed."""
        return [[str(cell) for cell in row] for row in self.rows]

    @property
    def json(self) -> dict[str, Any]:
        """Rows as JSON values: names unchanged, figures with their units."""
        rows = [
            [cell.json if isinstance(cell, Cell) else cell for cell in row]
            for row in self.rows
        ]
        return {"columns": list(self.columns), "rows": rows, "caption": self.caption}
