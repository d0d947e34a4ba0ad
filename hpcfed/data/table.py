"""A user's data in named columns, whose roles are guessed by their usual names, or given
by --dataset-options.

A table, `PATH.csv`, has a line for each sample, and names in the first line. Options are
target, client, split (`train` or `test` in every line), drop (columns to leave out) and
task. Every other column is an input: numbers, or words. A column of words becomes one
column of zeros and ones for each different word.
"""

import csv
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from hpcfed.data.arrays import InMemory, find, held_out, read_text
from hpcfed.errors import UserError, count, did_you_mean, remark
from hpcfed.runtime.launcher import launched

COLUMNS: dict[str, tuple[str, ...]] = {
    "input": (
        *("image", "img", "pixel_values", "input_ids", "inputs", "input"),
        *("features", "x"),
    ),
    "target": ("label", "labels", "fine_label", "targets", "target", "y"),
    "client": ("client", "client_id", "user", "user_id", "writer_id", "author"),
}
"""Usual names of columns, by their role here."""
ENDINGS = (".csv", ".tsv")
USUAL: dict[str, tuple[str, ...]] = {
    "target": (*COLUMNS["target"], "class"),
    "client": (*COLUMNS["client"], "owner", "site", "hospital"),
    "split": ("split",),
}
"""Usual names of a table's columns, by their role; all other columns are inputs."""
TABLE_OPTIONS = (*USUAL, "drop", "task")
TASKS = ("classification", "regression")
MISSING = ("na", "n/a", "nan", "null", "none", "?", "-", ".")
"""Words, in small letters, that stand for a missing number."""
DECIMAL_COMMA = re.compile(r"[+-]?\d+(,\d+)?")
MOST_WORDS = 100
"""The most different words of a column: names or dates have more, and are refused."""
BYTES_PER_BYTE = 40
"""The most host memory per byte of the file while it is read."""


def is_table(name: str) -> bool:
    """Tell whether a data set's name refers to a table."""
    return name.lower().endswith(ENDINGS)


def find_table(name: str, *, root: Path | None) -> Path:
    """Return the file of `PATH.csv`, perhaps after `file:`, as given or below the root."""
    wanted = "the path of a table with a header"
    return find(name, "file:patients.csv", root=root, wanted=wanted)


@cache
def read_table(path: Path, options: str) -> InMemory:
    """Return the arrays of a table; `options` is JSON with the roles of its columns."""
    table = _read(path)
    roles = _roles(table, json.loads(options))
    inputs = _inputs(table, roles)
    arrays, told = _targets(table, roles)
    arrays["inputs"] = inputs
    if roles.client:
        _check_filled(table, roles.client)
        arrays["clients"] = np.array(table.cells[roles.client])
    parts = _split(table, roles, arrays)
    return InMemory(str(path), parts, whole="the table", notes=told)


@dataclass(frozen=True)
class _Table:
    path: Path
    names: list[str]
    cells: dict[str, list[str]]
    """The texts of every column, by its name."""


@dataclass(frozen=True)
class _Roles:
    """Which column has which role."""

    target: str
    client: str | None
    split: str | None
    inputs: list[str]
    task: str | None


def _read(path: Path) -> _Table:
    instead = "; save it as an .npz (file:PATH.npz)"
    text = read_text(path, memory=BYTES_PER_BYTE, instead=instead)
    lines = text.splitlines()
    # Take the delimiter with most occurrences: some countries use semicolons.
    delimiter = max(",;\t", key=(lines or [""])[0].count)
    try:
        rows = [row for row in csv.reader(lines, delimiter=delimiter) if row]
    except csv.Error as error:
        raise UserError(f"{path}: cannot be read as a table ({error})") from None
    if len(rows) < 3:
        raise UserError(f"{path}: needs a line of names and two or more of samples")
    names = [name.strip() for name in rows[0]]
    own = f"{path}: the first line must give every column a name of its own"
    if "" in names:
        none = f"column {names.index('') + 1} has none"
        raise UserError(f"{own}; {none} (from pandas, write to_csv(…, index=False))")
    if len(set(names)) < len(names):
        raise UserError(own)
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
        if word not in TABLE_OPTIONS:
            raise UserError(
                f"{table.path}: --dataset-options has no {word}"
                f"{did_you_mean(word, TABLE_OPTIONS)}"
            )
    task = options.get("task")
    if task not in (None, *TASKS):
        raise UserError(
            f"{table.path}: task is {task!r}; it may be {' or '.join(TASKS)}"
        )
    found = {}
    # Names may be in capitals. Reversed, so that the first of two like names wins.
    lower = {name.lower(): name for name in reversed(table.names)}
    for kind, words in USUAL.items():
        usual = [lower[word] for word in words if word in lower]
        found[kind] = column_of(table.path, table.names, options, kind, usual)
    target = found["target"]
    if target is None:
        raise UserError(
            f"{table.path}: which of the columns {', '.join(table.names)} is the target? "
            'name it as in --dataset-options \'{"target": "ill"}\''
        )
    dropped = options.get("drop", [])
    dropped = dropped if isinstance(dropped, list) else [dropped]
    for name in dropped:
        _known(table.path, table.names, name)
    others = {*dropped, *(name for name in found.values() if name)}
    inputs = [name for name in table.names if name not in others]
    if not inputs:
        raise UserError(f"{table.path}: no column is left for inputs")
    return _Roles(target, found["client"], found["split"], inputs, task)


def column_of(
    path: Path,
    names: Sequence[str],
    options: Mapping[str, Any],
    kind: str,
    usual: Sequence[str],
) -> str | None:
    """Return the column with a role: as chosen, or else by its usual names."""
    # Not `options.get`: null is not the name of a column, and is refused.
    if kind in options:
        return _known(path, names, options[kind])
    return next((word for word in usual if word in names), None)


def _known(path: Path, names: Sequence[str], name: Any) -> str:
    if name not in names:
        raise UserError(f"{path}: no column {name}{did_you_mean(str(name), names)}")
    return str(name)


def _inputs(table: _Table, roles: _Roles) -> np.ndarray:
    """Return [samples, features], with one feature for every word of a word column."""
    features = []
    for name in roles.inputs:
        numbers = _numbers(table, name)
        if numbers is not None:
            features.append(numbers[:, None])
            continue
        words, which = np.unique(table.cells[name], return_inverse=True)
        if all(DECIMAL_COMMA.fullmatch(word) for word in words.tolist()):
            example = next(word for word in words if "," in word)
            raise UserError(
                f"{table.path}: column {name} has numbers with a comma, as {example}; "
                "write a point"
            )
        if len(words) > MOST_WORDS:
            raise UserError(
                f"{table.path}: column {name} has {len(words)} different words; leave it "
                f'out as in --dataset-options \'{{"drop": ["{name}"]}}\''
            )
        # Row k of the identity is the one-hot code of word k.
        features.append(np.eye(len(words))[which])
    return np.concatenate(features, axis=1)


def _targets(
    table: _Table, roles: _Roles
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Return classes in their order or numbers to predict, and what was presumed."""
    numbers = _numbers(table, roles.target)
    if roles.task == "regression" and numbers is None:
        raise UserError(
            f"{table.path}: column {roles.target} holds words; regression needs numbers"
        )
    # Whole numbers are taken for classes, unless `task` says otherwise.
    whole = numbers is None or bool((numbers == np.round(numbers)).all())
    if roles.task == "regression" or (roles.task is None and not whole):
        assert numbers is not None
        return {"targets": numbers}, ()
    values = np.array(table.cells[roles.target]) if numbers is None else numbers
    classes, labels = np.unique(values, return_inverse=True)
    if len(classes) == 1:
        raise UserError(
            f"{table.path}: column {roles.target} is {table.cells[roles.target][0]} in "
            "every sample, which leaves nothing to learn; there must be two classes"
        )
    told: tuple[str, ...] = ()
    if roles.task is None and numbers is not None:
        told = (
            f"{table.path}: column {roles.target} holds whole numbers, so they are "
            f'{len(classes):,} classes; --dataset-options \'{{"task": "regression"}}\' '
            "predicts them as numbers",
        )
    found = {"labels": labels.astype(np.int64), "classes": np.array(len(classes))}
    return found, told


def _numbers(table: _Table, name: str) -> np.ndarray | None:
    """Return a column as numbers; None if it holds words."""
    cells = table.cells[name]
    _check_filled(table, name)
    try:
        numbers = np.array(cells, dtype=np.float64)
    except ValueError:
        _check_words(table, name)
        return None
    strange = np.flatnonzero(~np.isfinite(numbers))
    if len(strange):
        first = int(strange[0])
        raise _missing(table, name, f"has numbers, and {cells[first]}", first + 1)
    return numbers


def _check_filled(table: _Table, name: str) -> None:
    if "" in table.cells[name]:
        raise _missing(table, name, "is empty", table.cells[name].index("") + 1)


def _missing(table: _Table, name: str, what: str, sample: int) -> UserError:
    return UserError(
        f"{table.path}: column {name} {what} in sample {sample}; fill it in, or leave "
        "out the column or the sample"
    )


def _check_words(table: _Table, name: str) -> None:
    """Refuse a column of numbers in which a few stand for a missing one, as NA does: it
    would be a column of words.
    """
    numbers, others = 0, []
    for number, cell in enumerate(table.cells[name], start=1):
        try:
            float(cell)
            numbers += 1
        except ValueError:
            others.append((cell, number))
    missing = [other for other in others if other[0].lower() in MISSING]
    if numbers and missing:
        cell, number = missing[0]
        raise _missing(table, name, f"has numbers, and {cell}", number)
    if numbers > len(others) and launched().rank == 0:
        cell, number = others[0]
        remark(
            f"{table.path}: column {name} counts as words, one feature for each: it has "
            f"{cell} in sample {number} beside {count(numbers, 'number')}"
        )


def _split(
    table: _Table, roles: _Roles, arrays: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the arrays of the training and the test set.

    Without a split, every tenth sample is for testing. If samples have owners, it is
    every tenth of each owner; the reader of the arrays does that.
    """
    found = {name: arrays[name] for name in {"classes"} & arrays.keys()}
    if roles.split is None and roles.client is not None:
        for name in arrays.keys() - found.keys():
            found[f"train_{name}"] = arrays[name]
        return found
    test = _for_testing(table, roles)
    for name in arrays.keys() - found.keys():
        found[f"train_{name}"] = arrays[name][~test]
        found[f"test_{name}"] = arrays[name][test]
    return found


def _for_testing(table: _Table, roles: _Roles) -> np.ndarray:
    if roles.split is None:
        # As if all samples belonged to one client.
        return held_out(np.zeros(len(table.cells[roles.target]), dtype=np.int64))
    said = np.char.lower(np.array(table.cells[roles.split]))
    strange = np.setdiff1d(said, ["train", "test"])
    if len(strange) or len(np.unique(said)) < 2:
        raise UserError(
            f"{table.path}: column {roles.split} must say train or test, and each at "
            "least once"
        )
    return said == "test"
