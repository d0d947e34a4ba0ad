"""A data set of Hugging Face's `datasets` that was saved to disk, `hf-data:DIR`.

The columns for inputs, targets and clients are guessed by their usual names, or given
by --dataset-options: input, target, client, and train and test for its splits.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from hpcfed import plugins
from hpcfed.data.array_source import InMemory
from hpcfed.data.places import find_folder
from hpcfed.errors import UserError, did_you_mean

PREFIX = "hf-data:"
COLUMNS: dict[str, tuple[str, ...]] = {
    "input": (
        *("image", "img", "pixel_values", "input_ids", "inputs", "input"),
        *("features", "x"),
    ),
    "target": ("label", "labels", "fine_label", "targets", "target", "y"),
    "client": ("client", "client_id", "user", "user_id", "writer_id", "author"),
}
"""Usual names of columns, by their role here."""
SPLITS = ("train", "test")


def is_hf(name: str) -> bool:
    """Tell whether a data set's name refers to a Hugging Face folder."""
    return name.startswith(PREFIX)


def find(name: str, *, root: Path | None) -> Path:
    """Return the folder of `hf-data:DIR`: as given, or else below the root."""
    return find_folder(
        name,
        PREFIX,
        root=root,
        example="femnist",
        wanted="that `save_to_disk` has written",
    )


@cache
def loaded(folder: Path, options: str) -> InMemory:
    """Return the arrays of a folder; `options` is JSON with the columns' names."""
    chosen = json.loads(options)
    for word in chosen:
        if word not in (*COLUMNS, *SPLITS):
            guess = did_you_mean(word, (*COLUMNS, *SPLITS))
            raise UserError(f"hf-data: --dataset-options has no {word}{guess}")
    arrays: dict[str, np.ndarray] = {}
    for split, rows in _splits(folder, chosen).items():
        names = _names(folder, rows.column_names, chosen)
        for kind, column in names.items():
            with plugins.one_line_of(f"{folder}: column {column} cannot be read"):
                values = np.asarray(rows.with_format("numpy")[column][:])
            if values.dtype.hasobject:
                raise UserError(
                    f"{folder}: samples of column {column} differ in length or are "
                    "not numbers; pad them first"
                )
            arrays[f"{split}_{_ending(kind, values)}"] = values
    return InMemory(str(folder), arrays, whole="the folder")


def _splits(folder: Path, chosen: Mapping[str, str]) -> dict[str, Any]:
    """Return the rows for training and, if there are any, for testing."""
    # Takes a second to import, and is often not installed.
    try:
        import datasets
    except ImportError:
        raise UserError(
            "hf-data: needs the package `datasets`; install hpcfed[hf]"
        ) from None
    with plugins.one_line_of(f"{folder} is not a data set that `save_to_disk` wrote"):
        found = datasets.load_from_disk(str(folder))
    if not isinstance(found, Mapping):
        return {"train": found}
    splits = {}
    for split in SPLITS:
        name = chosen.get(split, split)
        if name in found:
            splits[split] = found[name]
        elif split in chosen or split == "train":
            raise UserError(
                f"{folder}: no split {name}; there are {', '.join(found)}, to be named "
                f'as in --dataset-options \'{{"{split}": "{next(iter(found))}"}}\''
            )
    return splits


def _names(
    folder: Path, columns: Sequence[str], chosen: Mapping[str, str]
) -> dict[str, str]:
    """Return the columns by their role: as chosen, or by their usual names."""
    names = {}
    for kind, usual in COLUMNS.items():
        if kind in chosen:
            if chosen[kind] not in columns:
                guess = did_you_mean(chosen[kind], columns)
                raise UserError(f"{folder}: no column {chosen[kind]}{guess}")
            names[kind] = chosen[kind]
            continue
        for word in usual:
            if word in columns:
                names[kind] = word
                break
    if "input" not in names:
        raise UserError(
            f"{folder}: which of the columns {', '.join(columns)} is the input? name it "
            'as in --dataset-options \'{"input": "image", "target": "label"}\''
        )
    return names


def _ending(kind: str, values: np.ndarray) -> str:
    """Return the suffix of the array's name for a column."""
    if kind == "input":
        return "images" if values.dtype == np.uint8 else "inputs"
    return {"target": "targets", "client": "clients"}[kind]
