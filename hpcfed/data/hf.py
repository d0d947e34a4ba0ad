"""A data set of Hugging Face's `datasets` that was saved to disk, `hf-data:DIR`.

Which of its columns are inputs, targets and clients is guessed by their usual names, or
said with --dataset-options: input, target, client, and train and test for its splits.
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
"""What columns are usually called, by what they are here."""
SPLITS = ("train", "test")


def is_hf(name: str) -> bool:
    """Tell whether a data set's name means a folder of Hugging Face's."""
    return name.startswith(PREFIX)


def find(name: str, *, root: Path | None) -> Path:
    """Return the folder that `hf-data:DIR` means: as given, or else below the root."""
    return find_folder(
        name,
        PREFIX,
        root=root,
        example="femnist",
        wanted="that `save_to_disk` has written",
    )


@cache
def loaded(folder: Path, options: str) -> InMemory:
    """Return the arrays of a folder; the columns' names are JSON."""
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
                    f"{folder}: samples of column {column} differ in length or are no "
                    "numbers; pad them first"
                )
            arrays[f"{split}_{_ending(kind, values)}"] = values
    return InMemory(str(folder), arrays, whole="the folder")


def _splits(folder: Path, chosen: Mapping[str, str]) -> dict[str, Any]:
    """Return the rows for training and, where there are some, for testing."""
    # Takes a second to import, and few have it.
    try:
        import datasets
    except ImportError:
        raise UserError(
            "hf-data: needs the package `datasets`; install hpcfed[hf]"
        ) from None
    with plugins.one_line_of(
        f"{folder} is no data set that `save_to_disk` has written"
    ):
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
    """Return the columns by what they are here: as chosen, or by their usual names."""
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
    """Return the end of the array's name that a column becomes."""
    if kind == "input":
        return "images" if values.dtype == np.uint8 else "inputs"
    return {"target": "targets", "client": "clients"}[kind]
