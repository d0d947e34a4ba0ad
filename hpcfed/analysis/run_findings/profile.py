"""A profile's findings about a run's parts, compared with what its device can do."""

from collections.abc import Sequence
from math import nan

from hpcfed.analysis.findings import SECONDS, SHARE, Row, Table
from hpcfed.results.profiles import Part


def of_parts(parts: Sequence[Part]) -> Table:
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
