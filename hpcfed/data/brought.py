"""Data that users bring, by its name: an .npz file, a table, a folder of texts, a
Hugging Face data set on disk, or a function.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from hpcfed.data import DATASETS, Reading, hf, npz, own, table, text
from hpcfed.data.array_source import InMemory
from hpcfed.data.arrays import (
    Description,
    check_values,
    describe,
    read_all,
    with_owned_test,
)

FORMS = ("file:PATH.npz", "PATH.csv", "text:DIR", "hf-data:DIR", "FILE.py:NAME")
"""How such data is named, for messages."""


def is_brought(name: str) -> bool:
    """Tell whether a name refers to a user's data."""
    if name in DATASETS:
        return False
    if npz.is_file_name(name) or table.is_table(name):
        return True
    return text.is_text(name) or hf.is_hf(name) or own.is_own(name)


def place(name: str, *, root: Path | None) -> str:
    """Return where the data is, or what makes it."""
    if npz.is_file_name(name):
        return str(npz.find(name, root=root))
    if table.is_table(name):
        return str(table.find(name, root=root))
    if text.is_text(name):
        return str(text.find(name, root=root))
    return name


def require(name: str, *, root: Path | None, reading: Reading) -> None:
    """Raise UserError unless the data is valid, including its numbers."""
    if npz.is_file_name(name):
        npz.require(npz.find(name, root=root))
        return
    # The data stays in memory, so one check is enough.
    _check_once(name, root, _plain(reading))


def about(name: str, *, root: Path | None, reading: Reading) -> Description:
    """Return a description of the data."""
    if npz.is_file_name(name):
        return npz.about(npz.find(name, root=root))
    return _about(name, root, _plain(reading))


def read(name: str, *, root: Path | None, reading: Reading) -> dict[str, np.ndarray]:
    """Return the data's arrays, as `arrays.read_all` does."""
    if npz.is_file_name(name):
        arrays = npz.read(npz.find(name, root=root))
    else:
        source = _in_memory(name, root, _plain(reading))
        arrays = read_all(source, describe(source))
    return with_owned_test(arrays) if reading.natural else arrays


def _plain(reading: Reading) -> Reading:
    """Return how the arrays are made, without later processing."""
    return replace(reading, natural=False)


@cache
def _about(name: str, root: Path | None, reading: Reading) -> Description:
    return describe(_in_memory(name, root, reading))


@cache
def _check_once(name: str, root: Path | None, reading: Reading) -> None:
    check_values(_in_memory(name, root, reading), _about(name, root, reading))


def _in_memory(name: str, root: Path | None, reading: Reading) -> InMemory:
    if table.is_table(name):
        return table.loaded(table.find(name, root=root), reading.options)
    if text.is_text(name):
        return text.loaded(text.find(name, root=root), reading.text)
    if hf.is_hf(name):
        return hf.loaded(hf.find(name, root=root), reading.options)
    return own.loaded(name, reading.options)
