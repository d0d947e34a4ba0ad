"""Where a user's arrays come from, and which of them have a meaning."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hpcfed.errors import UserError

NAMES = ("train_images", "train_labels", "test_images", "test_labels")
"""The arrays of labelled images, as messages name them."""
KNOWN = (
    *(
        f"{split}_{kind}"
        for split in ("train", "test")
        for kind in ("images", "inputs")
    ),
    *(
        f"{split}_{kind}"
        for split in ("train", "test")
        for kind in ("labels", "targets")
    ),
    *("train_clients", "test_clients", "classes", "vocabulary"),
)
"""All arrays that have a meaning; others are ignored."""
Header = tuple[tuple[int, ...], np.dtype]
"""Shape and type of an array."""


class Source(Protocol):
    """Where arrays come from."""

    @property
    def where(self) -> str:
        """The file or function, for messages."""

    @property
    def whole(self) -> str:
        """What holds the arrays, for messages: `the file`."""

    def names(self) -> Collection[str]:
        """Return the names of all arrays."""

    def header(self, array: str) -> Header:
        """Return shape and type of an array, without reading it if possible."""

    def read(self, array: str) -> np.ndarray: ...


@dataclass(frozen=True)
class InMemory:
    """Arrays that are already in memory."""

    where: str
    arrays: Mapping[str, np.ndarray]
    whole: str = "the dict"

    def names(self) -> Collection[str]:
        return self.arrays.keys()

    def header(self, array: str) -> Header:
        found = self.arrays[array]
        return found.shape, found.dtype

    def read(self, array: str) -> np.ndarray:
        return self.arrays[array]


def header(source: Source, array: str) -> Header:
    """Return shape and type of an array, which must exist."""
    if array not in source.names():
        raise UserError(
            f"{source.where}: no array {array}; {source.whole} must hold train_inputs "
            "(or train_images), train_labels (or train_targets) and the same for test, "
            "which may be left out beside train_clients"
        )
    return source.header(array)
