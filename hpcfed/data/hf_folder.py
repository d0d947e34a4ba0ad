"""A user's data set of Hugging Face's `datasets` that was saved to disk: `hf-data:DIR`.

Options are input, target and client, the names of columns; train and test, the names of
splits; and classes and vocabulary.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from hpcfed import plugins
from hpcfed.data.arrays import InMemory, find
from hpcfed.data.table import COLUMNS, column_of
from hpcfed.errors import UserError, did_you_mean

SPLITS = ("train", "test")
SIZES = ("classes", "vocabulary")
HF_OPTIONS = (*COLUMNS, *SPLITS, *SIZES)


def is_hf(name: str) -> bool:
    """Tell whether a data set's name refers to a Hugging Face folder."""
    return name.startswith("hf-data:")


def find_hf(name: str, *, root: Path | None) -> Path:
    """Return the folder of `hf-data:DIR`: as given, or else below the root."""
    wanted = "one that `save_to_disk` has written"
    return find(name, "hf-data:femnist", root=root, wanted=wanted)


@cache
def read_hf(folder: Path, options: str) -> InMemory:
    """Return the arrays of a folder; `options` is JSON with the columns' names."""
    chosen = json.loads(options)
    for word in chosen:
        if word not in HF_OPTIONS:
            guess = did_you_mean(word, HF_OPTIONS)
            raise UserError(f"hf-data: --dataset-options has no {word}{guess}")
    arrays = {size: np.array(chosen[size]) for size in SIZES if size in chosen}
    splits = _splits(folder, chosen)
    for split, rows in splits.items():
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
    if "test" not in splits and "train_clients" not in arrays:
        raise UserError(
            f"{folder}: no split test; name one as in --dataset-options "
            '\'{"test": "validation"}\', or a column that says whose samples are whose, '
            'as in \'{"client": "user"}\': then some of each client are for testing'
        )
    return InMemory(str(folder), arrays, "the folder", sized_by=" in --dataset-options")


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
    # A `DatasetDict` has splits and is a dict; a `Dataset` is neither.
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
        if (found := column_of(folder, columns, chosen, kind, usual)) is not None:
            names[kind] = found
    if "input" not in names:
        raise UserError(
            f"{folder}: which of the columns {', '.join(columns)} is the input? name it "
            'as in --dataset-options \'{"input": "image", "target": "label"}\''
        )
    return names


def _ending(kind: str, values: np.ndarray) -> str:
    """Return the suffix of the array's name for a column."""
    is_image = kind == "input" and values.dtype == np.uint8
    return "images" if is_image else f"{kind}s"
