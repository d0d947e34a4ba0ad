"""Options of the data set."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Literal

from hpcfed.data import DatasetInfo, Reading, TextPlan, files
from hpcfed.data.brought import is_brought
from hpcfed.data.npz import is_file_name
from hpcfed.options.declare import OptionGroup, Switch, option
from hpcfed.options.seeds import Seed
from hpcfed.options.tables import Table

# Five digits a side keep the number of pixels within 64 bits.
SHAPE = r"^[1-9]\d{0,4}x[1-9]\d{0,4}x[1-9]\d{0,4}$"
"""How --synthetic-shape is written."""


class DataOptions(OptionGroup):
    title: ClassVar[str] = "data set"

    # Not a Literal: file:PATH names any file of the user's.
    dataset: str = option(
        "digits",
        "a data set that `hpcfed list` names, or your own: file:PATH.npz, PATH.csv, "
        "text:DIR, hf-data:DIR, or a function as FILE.py:NAME or package.module:NAME",
    )
    dataset_options: Table = option(
        None,
        "keywords for your own function, or columns of a table or hf-data, as JSON: "
        "'{\"users\": 40}'",
    )
    data_root: Path | None = option(
        None, "folder of the data sets (default: $HPCFED_DATA, else ./data)"
    )
    download: bool = option(False, "let torchvision download what is missing")
    synthetic_shape: str = option(
        "3x32x32", "synthetic: channels x height x width", pattern=SHAPE
    )
    synthetic_classes: int = option(10, "synthetic: number of classes", ge=2)
    text_clients: str = option(
        "file",
        "text: one client for each file, or for whatever the first group of this regular "
        "expression finds in files' names, such as '_(.+)_'",
    )
    text_tokens: Literal["chars", "bytes"] = option(
        "chars", "text: what is predicted; chars: those of the training text"
    )
    text_length: int = option(128, "text: tokens of a sample", ge=1, le=2**20)
    text_test: float = option(
        0.1, "text: share of each file, at its end, for testing", gt=0, lt=1
    )
    # 0 is a seed like any other, not "unset".
    data_seed: Seed | None = option(
        None,
        "seed of the partition and of synthetic data (default: --seed)",
        zero=True,
    )

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of synthetic images: channels, height, width."""
        channels, height, width = self.synthetic_shape.split("x")
        return int(channels), int(height), int(width)

    @property
    def reading(self) -> Reading:
        """How data of the user's is read."""
        plan = TextPlan(
            self.text_clients, self.text_tokens, self.text_length, self.text_test
        )
        return Reading(self.dataset_options or "{}", plan)

    @property
    def root(self) -> Path:
        """The folder of the data sets."""
        return self.data_root or Path(os.environ.get("HPCFED_DATA") or "data")

    def data(self) -> DatasetInfo:
        """Return the shape and classes of the data set without loading it.

        A data set that is unknown, or a file that is not there, is refused.
        """
        return files.info(
            self.dataset,
            root=self.root,
            synthetic_shape=self.shape,
            synthetic_classes=self.synthetic_classes,
            reading=self.reading,
        )


def data_switches(config: DataOptions) -> Iterable[Switch]:
    """Name the options of this group that act only where something else is on."""
    synthetic = config.dataset == "synthetic"
    yield Switch("synthetic_shape", "--dataset synthetic", synthetic)
    yield Switch("synthetic_classes", "--dataset synthetic", synthetic)
    text = config.dataset.startswith("text:")
    for name in ("text_clients", "text_tokens", "text_length", "text_test"):
        yield Switch(name, "--dataset text:DIR", text)
    own = is_brought(config.dataset) and not text
    takes_options = own and not is_file_name(config.dataset)
    yield Switch("dataset_options", "--dataset FILE.py:NAME", takes_options)


def check_data(config: DataOptions) -> None:
    """Refuse a data set that is unknown, or that is not there and not to be fetched."""
    files.require(
        config.dataset,
        root=config.root,
        download=config.download,
        reading=config.reading,
    )
