"""Datasets as run.h5 has them: in chunks with checksums, and each says what it holds."""

from collections.abc import Sequence
from math import prod
from typing import Any

import h5py
import numpy as np

CHUNK = 2**16
"""Bytes of a chunk, or a round where that is more."""

WIDE = 2**16
"""Bytes of a round's figures from which on a round without any is not written."""


def create(
    file: h5py.File,
    name: str,
    shape: tuple[int, ...],
    *dimensions: str,
    unit: str,
    meaning: str,
    dtype: str | np.dtype = "f8",
    **more: Any,
) -> h5py.Dataset:
    """Create a dataset; NaN where nothing is written, unless `data` or another
    `fillvalue` is given.

    It has chunks with checksums, so that a reader notices when bytes have changed.
    """
    # NaN says "not there" in every dataset of figures; 0 would be a figure.
    if "data" not in more:
        more.setdefault("fillvalue", np.nan)
    # HDF5 has neither chunks nor checksums for a single number.
    if shape:
        # A chunk holds whole rounds: they are written one after the other.
        length, *others = shape
        round_bytes = prod(others) * np.dtype(dtype).itemsize
        rounds = max(1, CHUNK // max(1, round_bytes))
        more["chunks"] = (min(length, rounds), *others)
        more["fletcher32"] = True
    dataset = file.create_dataset(name, shape, dtype, **more)
    dataset.attrs["units"] = unit
    dataset.attrs["description"] = meaning
    for axis, dimension in enumerate(dimensions):
        dataset.dims[axis].label = dimension
    return dataset


def create_names(file: h5py.File, name: str, names: Sequence[str]) -> None:
    """Store what the entries of another dataset's dimension are called."""
    file[name] = np.array(names, dtype=h5py.string_dtype())


def write_rounds(data: h5py.Dataset, array: np.ndarray, fresh: slice) -> None:
    """Bring rounds into the file. One that was not evaluated is NaN there already: for a
    million clients that would be 4 MB each time.
    """
    if array.ndim == 1 or array[0].nbytes < WIDE:
        data[fresh] = array[fresh]
        return
    for round in range(fresh.start, fresh.stop):
        if not np.isnan(array[round]).all():
            data[round] = array[round]
