"""A profile's findings about a run's parts, compared with what its device can do."""

from collections.abc import Sequence
from math import nan
from typing import Protocol

from hpcfed.analysis.findings import SECONDS, SHARE, Row, Table


class ProfiledPart(Protocol):
    """The clients' training, or one of the server's networks; None means unknown."""

    @property
    def name(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def warm(self) -> float | None: ...
    @property
    def busy(self) -> float | None: ...
    @property
    def compute(self) -> float | None: ...
    @property
    def bandwidth(self) -> float | None: ...


def of_parts(parts: Sequence[ProfiledPart]) -> Table:
    """Return the time of each part, and its share of the measured ceilings."""
    rows: list[Row] = []
    for part in parts:
        shares = (part.busy, part.compute, part.bandwidth)
        warm = SECONDS(_known(part.warm))
        cells = [SHARE(_known(share)) for share in shares]
        rows.append([part.name, SECONDS(part.seconds), warm, *cells])
    head = "beside these ceilings"
    return Table(
        (head, "seconds", "warm", "busy", "MFU", "bandwidth, at least"),
        rows,
        # Without this line a reader would relate the run's FLOPs to the first column.
        "warm: at the pace of the last rounds or steps, which MFU and bandwidth are of",
    )


def _known(value: float | None) -> float:
    return nan if value is None else value
