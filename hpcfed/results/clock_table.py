"""The clock table of run.h5: what every member of every round took, in virtual time."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from hpcfed.results.folder import RECORD
from hpcfed.results.metric_arrays import MetricArray
from hpcfed.results.safe import readable, reading

MOST_ENTRIES = 2_000_000
"""Rounds times members up to which a run records them: 72 MB."""
_COLUMNS = {
    "client": ("client", "id of the member; NaN: the round has no more", "f8"),
    "download": ("s", "virtual seconds of its downloads", "f4"),
    "train": ("s", "virtual seconds of its local steps", "f4"),
    "upload": ("s", "virtual seconds of its uploads", "f4"),
    "steps": ("1", "local steps that it has taken", "f4"),
    "arrival": ("s", "virtual time at which its upload came; NaN: it never did", "f8"),
    "arrived": ("1", "1 where its upload counted, else 0", "f4"),
}
"""Unit, meaning and type of every column."""


def clock_arrays(rounds: int, members: int) -> Iterator[MetricArray]:
    """Yield the datasets for rounds with so many members; none for too many of them."""
    if rounds * members > MOST_ENTRIES:
        return
    for name, (unit, meaning, dtype) in _COLUMNS.items():
        yield MetricArray(
            f"clock/{name}",
            (rounds, members),
            ("round", "member"),
            unit,
            meaning,
            dtype,
        )


def take_down(
    arrays: Mapping[str, np.ndarray], round: int, table: Mapping[str, np.ndarray]
) -> None:
    """Write a round's members into the arrays of its datasets, where there are any."""
    for name, values in table.items():
        array = arrays.get(f"clock/{name}")
        if array is not None:
            # By --sampling poisson a round may have more, if hardly ever.
            width = array.shape[1]
            array[round, : len(values)] = values[:width]


def read_clock(folder: Path, rounds: int) -> dict[str, np.ndarray]:
    """Read the members of the first rounds of a run, a row for each: the round, counted
    from 1, and the columns of the table. There is none in runs without a clock.
    """
    path = folder / RECORD
    with readable(path, "a run"), reading(path) as file:
        columns = {}
        for name in _COLUMNS:
            if f"clock/{name}" in file:
                values = file.numbers(f"clock/{name}", (None, None), rounds)
                columns[name] = values.astype(np.float64)
        if columns.keys() != _COLUMNS.keys():
            return {name: np.empty(0) for name in ("round", *_COLUMNS)}
        return _rows(columns)


def _rows(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the entries that a round has, one below the other; ValueError for numbers
    that cannot be.
    """
    client = columns["client"]
    for name, values in columns.items():
        alike = values.shape == client.shape
        if not alike or (values < 0).any() or np.isinf(values).any():
            raise ValueError(f"clock/{name} holds numbers that cannot be")
    round, member = np.nonzero(~np.isnan(client))
    found = {"round": round + 1}
    for name, values in columns.items():
        found[name] = values[round, member]
    found["client"] = found["client"].astype(np.int64)
    return found
