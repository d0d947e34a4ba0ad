"""Tables for Python: a DataFrame where pandas is installed, else numpy's structured
array with the same columns.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

Columns = Mapping[str, np.ndarray]
"""A table's columns by name, equally long."""


def table(columns: Columns) -> Any:
    """Return a DataFrame; without pandas an array whose fields are the columns."""
    if find_spec("pandas") is not None:
        import pandas

        return pandas.DataFrame(dict(columns))
    kinds = [(name, values.dtype) for name, values in columns.items()]
    length = len(next(iter(columns.values()), ()))
    array = np.empty(length, kinds)
    for name, values in columns.items():
        array[name] = values
    return array


def stacked(tables: Sequence[tuple[int, Columns]]) -> Columns:
    """Put the tables of several seeds below each other, with a column `seed` before the
    others; a single one stays as it is.
    """
    if len(tables) == 1:
        return tables[0][1]
    seeds = []
    for seed, columns in tables:
        rows = len(next(iter(columns.values())))
        seeds.append(np.full(rows, seed))
    joined = {"seed": np.concatenate(seeds)}
    for name in tables[0][1]:
        joined[name] = np.concatenate([columns[name] for _, columns in tables])
    return joined
