"""A user's table, `PATH.csv`: a line for each sample, with names in the first line.

The columns for target and client are guessed by their usual names, or given by
--dataset-options: target, client, split (`train` or `test` in every line), drop
(columns to leave out) and task. Every other column is an input: numbers, or words. A
column of words becomes one column of zeros and ones for each different word.
"""

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from hpcfed.data.array_source import InMemory
from hpcfed.data.arrays import held_out
from hpcfed.data.hf import COLUMNS
from hpcfed.data.places import find_file
from hpcfed.errors import UserError, count, did_you_mean
from hpcfed.runtime import machine

PREFIX = "file:"
"""Optional prefix of the path, as for an .npz."""
ENDINGS = (".csv", ".tsv")
USUAL: dict[str, tuple[str, ...]] = {
    "target": (*COLUMNS["target"], "class"),
    "client": (*COLUMNS["client"], "owner", "site", "hospital"),
    "split": ("split",),
}
"""Usual names of columns, by their role here."""
OPTIONS = (*USUAL, "drop", "task")
TASKS = ("classification", "regression")
MOST_WORDS = 100
"""The most different words of a column: names or dates have more, and are refused."""
BYTES_PER_BYTE = 40
"""The most host memory per byte of the file while it is read."""


def is_table(name: str) -> bool:
    """Tell whether a data set's name refers to a table."""
    return name.lower().endswith(ENDINGS)


def find(name: str, *, root: Path | None) -> Path:
    """Return the file of `PATH.csv`: as given, or else below the root."""
    return find_file(
        name, PREFIX, root=root, example="patients.csv", wanted="a table with a header"
    )


@cache
def loaded(path: Path, options: str) -> InMemory:
    """Return the arrays of a table; `options` is JSON with the roles of its columns."""
    table = _read(path)
    roles = _roles(table, json.loads(options))
    inputs = _inputs(table, roles)
    arrays = _targets(table, roles)
    arrays["inputs"] = inputs
    if roles.client:
        arrays["clients"] = np.array(table.column(roles.client))
    return InMemory(str(path), _split(table, roles, arrays), whole="the table")


@dataclass(frozen=True)
class _Table:
    path: Path
    names: list[str]
    cells: dict[str, list[str]]
    """The texts of every column, by its name."""

    def column(self, name: str) -> list[str]:
        return self.cells[name]


@dataclass(frozen=True)
class _Roles:
    """Which column has which role."""

    target: str
    client: str | None
    split: str | None
    inputs: list[str]
    task: str | None


def _read(path: Path) -> _Table:
    size = path.stat().st_size
    if BYTES_PER_BYTE * size > machine.usable():
        raise UserError(
            f"{path}: {size / 2**30:,.1f} GiB of text take more than this machine's "
            "memory to read; save it as an .npz (file:PATH.npz)"
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8; convert it") from None
    lines = text.splitlines()
    header = lines[0] if lines else ""
    # Take the delimiter with most occurrences: some countries use semicolons.
    delimiter = max(",;\t", key=header.count)
    try:
        rows = [row for row in csv.reader(lines, delimiter=delimiter) if row]
    except csv.Error as error:
        raise UserError(f"{path}: cannot be read as a table ({error})") from None
    if len(rows) < 3:
        raise UserError(f"{path}: needs a line of names and two or more of samples")
    names = [name.strip() for name in rows[0]]
    if len(set(names)) < len(names) or "" in names:
        raise UserError(
            f"{path}: the first line must name every column, each by another name"
        )
    for number, row in enumerate(rows[1:], start=1):
        if len(row) != len(names):
            raise UserError(
                f"{path}: sample {number} has {count(len(row), 'column')}, the first "
                f"line has {len(names)}"
            )
    columns = zip(*rows[1:], strict=True)
    cells = {}
    for name, column in zip(names, columns, strict=True):
        cells[name] = [cell.strip() for cell in column]
    return _Table(path, names, cells)


def _roles(table: _Table, options: Mapping[str, Any]) -> _Roles:
    for word in options:
        if word not in OPTIONS:
            raise UserError(
                f"{table.path}: --dataset-options has no {word}"
                f"{did_you_mean(word, OPTIONS)}"
            )
    task = options.get("task")
    if task not in (None, *TASKS):
        raise UserError(
            f"{table.path}: task is {task!r}; it may be {' or '.join(TASKS)}"
        )
    found = {kind: _column(table, kind, options) for kind in USUAL}
    target = found["target"]
    if target is None:
        raise UserError(
            f"{table.path}: which of the columns {', '.join(table.names)} is the target? "
            'name it as in --dataset-options \'{"target": "ill"}\''
        )
    dropped = options.get("drop", [])
    dropped = [dropped] if isinstance(dropped, str) else list(dropped)
    for name in dropped:
        _known(table, name)
    others = {*dropped, *(name for name in found.values() if name)}
    inputs = [name for name in table.names if name not in others]
    if not inputs:
        raise UserError(f"{table.path}: no column is left for inputs")
    return _Roles(target, found["client"], found["split"], inputs, task)


def _column(table: _Table, kind: str, options: Mapping[str, Any]) -> str | None:
    """Return the column of the target, the client or the split: as chosen, or by its
    usual name.
    """
    if kind in options:
        return _known(table, options[kind])
    lower = {name.lower(): name for name in reversed(table.names)}
    return next((lower[word] for word in USUAL[kind] if word in lower), None)


def _known(table: _Table, name: Any) -> str:
    if not isinstance(name, str) or name not in table.cells:
        guess = did_you_mean(str(name), table.names)
        raise UserError(f"{table.path}: no column {name}{guess}")
    return name


def _inputs(table: _Table, roles: _Roles) -> np.ndarray:
    """Return [samples, features], with one feature for every word of a word column."""
    features = []
    for name in roles.inputs:
        numbers = _numbers(table, name)
        if numbers is not None:
            features.append(numbers[:, None])
            continue
        words, which = np.unique(table.column(name), return_inverse=True)
        if len(words) > MOST_WORDS:
            raise UserError(
                f"{table.path}: column {name} has {len(words)} different words; leave it "
                f'out as in --dataset-options \'{{"drop": ["{name}"]}}\''
            )
        features.append(np.eye(len(words))[which])
    return np.concatenate(features, axis=1)


def _targets(table: _Table, roles: _Roles) -> dict[str, np.ndarray]:
    """Return classes, numbered in their order, or numbers to predict."""
    numbers = _numbers(table, roles.target)
    if roles.task == "regression" and numbers is None:
        raise UserError(
            f"{table.path}: column {roles.target} holds words; regression needs numbers"
        )
    whole = numbers is None or bool((numbers == np.round(numbers)).all())
    if roles.task == "regression" or (roles.task is None and not whole):
        assert numbers is not None
        return {"targets": numbers}
    values = np.array(table.column(roles.target)) if numbers is None else numbers
    classes, labels = np.unique(values, return_inverse=True)
    return {"labels": labels.astype(np.int64), "classes": np.array(len(classes))}


def _numbers(table: _Table, name: str) -> np.ndarray | None:
    """Return a column as numbers; None if it holds words."""
    cells = table.column(name)
    if "" in cells:
        raise UserError(
            f"{table.path}: column {name} is empty in sample {cells.index('') + 1}; fill "
            "it in, or leave out the column or the sample"
        )
    try:
        return np.array(cells, dtype=np.float64)
    except ValueError:
        return None


def _split(
    table: _Table, roles: _Roles, arrays: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the arrays of the training and the test set.

    Without a split, every tenth sample is for testing. If samples have owners, it is
    every tenth of each owner; the reader of the arrays does that.
    """
    whole = {"classes"} & arrays.keys()
    found = {name: arrays[name] for name in whole}
    if roles.split is None and roles.client is not None:
        for name in arrays.keys() - whole:
            found[f"train_{name}"] = arrays[name]
        return found
    test = _for_testing(table, roles)
    for name in arrays.keys() - whole:
        found[f"train_{name}"] = arrays[name][~test]
        found[f"test_{name}"] = arrays[name][test]
    return found


def _for_testing(table: _Table, roles: _Roles) -> np.ndarray:
    if roles.split is None:
        # As if all samples belonged to one client.
        samples = len(table.column(roles.target))
        return held_out(np.zeros(samples, dtype=np.int64))
    said = np.char.lower(np.array(table.column(roles.split)))
    strange = np.setdiff1d(said, ["train", "test"])
    if len(strange) or len(np.unique(said)) < 2:
        raise UserError(
            f"{table.path}: column {roles.split} must say train or test, and each at "
            "least once"
        )
    return said == "test"
