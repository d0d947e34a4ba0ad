"""Options of the data set."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from hpcfed.config.declare import OptionGroup, Switch, option
from hpcfed.data import DatasetInfo, files

# Five digits a side keep the number of pixels within 64 bits.
SHAPE = r"^[1-9]\d{0,4}x[1-9]\d{0,4}x[1-9]\d{0,4}$"
"""How --synthetic-shape is written."""


class DataOptions(OptionGroup):
    title: ClassVar[str] = "data set"

    # Not a Literal: file:PATH names any file of the user's.
    dataset: str = option(
        "digits", "a data set that `hpcfed list` names, or file:PATH.npz with your own"
    )
    data_root: Path | None = option(
        None, "folder of the data sets (default: $HPCFED_DATA, else ./data)"
    )
    download: bool = option(False, "let torchvision download what is missing")
    synthetic_shape: str = option(
        "3x32x32", "synthetic: channels x height x width", pattern=SHAPE
    )
    synthetic_classes: int = option(10, "synthetic: number of classes", ge=2)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of synthetic images: channels, height, width."""
        channels, height, width = self.synthetic_shape.split("x")
        return int(channels), int(height), int(width)

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
        )


def data_switches(config: DataOptions) -> Iterable[Switch]:
    """Name the options of this group that act only where something else is on."""
    synthetic = config.dataset == "synthetic"
    yield Switch("synthetic_shape", "--dataset synthetic", synthetic)
    yield Switch("synthetic_classes", "--dataset synthetic", synthetic)


def check_data(config: DataOptions) -> None:
    """Refuse a data set that is unknown, or that is not there and not to be fetched."""
    files.require(config.dataset, root=config.root, download=config.download)
