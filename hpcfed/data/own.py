"""A user's data from a function or class in a file, a package or a plugin.

It returns the arrays of `arrays` as a dict, of numpy or torch, or two torch data sets
(train, test), whose items are (input, target) or (input, target, client). A dict with
`train` and `test` may also have `vocabulary` or `classes`. The function is called once
per process, and from a program once per run.

What it draws from torch's, numpy's or Python's global generators is the same in every
process, for every seed: seeds share the data, and a resumed run loads it again.
"""

import inspect
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from hpcfed import plugins
from hpcfed.data.arrays import KNOWN, InMemory
from hpcfed.errors import UserError, did_you_mean, remark
from hpcfed.runtime import machine
from hpcfed.runtime.launcher import launched

ITEMS = "(input, target) or (input, target, client)"
AGAIN = 8
"""How many items are read again, to see whether they are drawn."""
PATIENCE = 5.0
"""Seconds between two lines about a data set that is being read."""


_drawing: set[str] = set()
"""Data sets that have drawn from a generator outside of their functions."""


def is_own(name: str) -> bool:
    """Tell whether a name refers to a user's function, or an installed plugin."""
    return plugins.is_reference(name) or name in plugins.installed("datasets")


@cache
def loaded(name: str, options: str) -> InMemory:
    """Return what the user's function gives for these keywords, which are JSON."""
    # Not above: a command line without such data loads no torch.
    from hpcfed.runtime import draws

    # Apart: a file that is imported already draws nothing again.
    with _seeded():
        found = _found(name)
    with _seeded():
        own = draws.taken_from_outside(draws.functions_of(found))
        before = {word: draws.state_of(own[word]) for word in own}
        made = _called(name, found, json.loads(options))
        notes: list[str] = []
        arrays = _arrays(name, _whole(name, made), notes)
        drawn = [word for word in own if draws.state_of(own[word]) != before[word]]
        if drawn and name in _drawing:
            notes.append(
                f"data set {name} draws from {', '.join(drawn)}, which has moved on since "
                "the last run: it gives other samples; make the generator in the function"
            )
        if drawn:
            _drawing.add(name)
        return InMemory(f"data set {name}", arrays, notes=tuple(notes))


@contextmanager
def _seeded() -> Iterator[None]:
    """Let the user's code draw the same numbers whenever it is called."""
    # Not above: a command line without such data loads no torch.
    import torch

    from hpcfed.runtime import draws

    with draws.seeded(0, torch.device("cpu")):
        yield


def _whole(name: str, made: Any) -> Mapping[Any, Any]:
    """Return what a function has made as a dict."""
    # An object with two data sets as attributes, such as those of many libraries.
    if hasattr(made, "train") and hasattr(made, "test"):
        made = {"train": made.train, "test": made.test}
    elif isinstance(made, tuple | list) and len(made) == 2:
        made = {"train": made[0], "test": made[1]}
    if not isinstance(made, Mapping):
        raise UserError(
            f"data set {name} returns {type(made).__name__}; it must return a dict of "
            "arrays such as train_inputs, or two data sets, train and test"
        )
    return made


def _found(name: str) -> Any:
    if plugins.is_reference(name):
        return plugins.load_object(name, "data set")
    return plugins.load_installed(plugins.installed("datasets")[name])


def _called(name: str, found: Any, keywords: Mapping[str, Any]) -> Any:
    """Call the user's function; an object that is not callable is used directly."""
    if not callable(found):
        if keywords:
            raise UserError(
                f"data set {name} is not a function, and takes no --dataset-options"
            )
        return found
    _check_keywords(name, found, keywords)
    with plugins.one_line_of(f"data set {name} failed"):
        return found(**keywords)


def _check_keywords(name: str, found: Any, keywords: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return  # some builtins have none
    try:
        signature.bind(**keywords)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "none"
        raise UserError(
            f"data set {name}: {error}; --dataset-options it takes: {takes}"
        ) from None


def _arrays(
    name: str, made: Mapping[Any, Any], notes: list[str]
) -> dict[str, np.ndarray]:
    """Return arrays by their names; `train` and `test` are torch data sets. Adds what is
    to be told to `notes`.
    """
    arrays: dict[str, np.ndarray] = {}
    known = ("train", "test", *KNOWN)
    for key, value in made.items():
        if key not in known:
            guess = did_you_mean(str(key), known)
            raise UserError(f"data set {name}: unknown key {key!r}{guess}")
        if key in ("train", "test"):
            arrays |= _columns(name, key, value, notes)
        else:
            arrays[key] = _array(name, key, value)
    return arrays


def _columns(
    name: str, split: str, items: Any, notes: list[str]
) -> dict[str, np.ndarray]:
    """Return the inputs, targets and, if present, clients of all items, as arrays."""
    gathered: list[list[np.ndarray]] = []
    with plugins.one_line_of(f"data set {name}: its {split} set failed"):
        reading = _Reading(f"data set {name}: its {split} set", items)
        for item in _each(items):
            if not isinstance(item, tuple | list) or len(item) not in (2, 3):
                raise UserError(
                    f"data set {name}: an item of its {split} set is "
                    f"{type(item).__name__}; items must be {ITEMS}"
                )
            _check_input(name, split, item[0])
            gathered.append([_array(name, split, value) for value in item])
            reading.took(sum(array.nbytes for array in gathered[-1]))
        firsts = [item[0] for item in gathered[:AGAIN]]
        if _changes(name, split, items, firsts):
            notes.append(
                f"data set {name}: items of its {split} set differ when they are read "
                "again, and hpcfed reads each once: what they draw stays the same in "
                "all epochs; --augment crop-flip draws anew"
            )
    if not gathered:
        raise UserError(f"data set {name}: its {split} set is empty")
    if len({len(item) for item in gathered}) > 1:
        raise UserError(
            f"data set {name}: some items of its {split} set have a client and some "
            "do not; give every item one"
        )
    columns = {}
    kinds = ("inputs", "targets", "clients")[: len(gathered[0])]
    for kind, values in zip(kinds, zip(*gathered, strict=True), strict=True):
        shapes = sorted({value.shape for value in values})
        if len(shapes) > 1:
            raise UserError(
                f"data set {name}: {kind} of its {split} set have shapes "
                f"{list(shapes[0])} and {list(shapes[-1])}; give all the same, padded"
            )
        columns[f"{split}_{kind}"] = np.stack(values)
    # Bytes are raw pixels: standardised ones would be floats.
    if columns[f"{split}_inputs"].dtype == np.uint8:
        columns[f"{split}_images"] = columns.pop(f"{split}_inputs")
    return columns


def _check_input(name: str, split: str, value: Any) -> None:
    """Refuse several inputs in one item, which would become one array."""
    parts = value if isinstance(value, tuple | list) else ()
    if any(getattr(part, "shape", ()) for part in parts):
        raise UserError(
            f"data set {name}: an input of its {split} set is {len(parts)} arrays; give "
            "one, and let the network's forward take it apart"
        )


def _changes(name: str, split: str, items: Any, firsts: list[np.ndarray]) -> bool:
    """Tell whether some of the first inputs differ when they are read again."""
    # What has no length may be read only once.
    if not hasattr(items, "__len__"):
        return False
    for position, first in enumerate(firsts):
        again = _array(name, split, items[position][0])
        if again.tobytes() != first.tobytes():
            return True
    return False


class _Reading:
    """Watches a data set being read: refuses too much, and reports progress."""

    def __init__(self, whose: str, items: Any) -> None:
        self._whose = whose
        self._total = len(items) if hasattr(items, "__len__") else None
        self._count = self._bytes = 0
        self._begin = self._told = time.monotonic()
        self._most = machine.usable()

    def took(self, size: int) -> None:
        """Count an item of `size` bytes."""
        self._count += 1
        self._bytes += size
        # The first item tells how large all will be, before they are read.
        whole = self._bytes
        if self._total is not None:
            # An extrapolation, so that a set too large is refused after its first
            # items.
            whole = max(whole, self._bytes * self._total // self._count)
        if whole > self._most:
            of_all = "" if self._total is None else f" of {self._total:,} items"
            raise UserError(
                f"{self._whose}{of_all} needs {whole / 2**30:,.1f} GiB, and this machine "
                f"has {self._most / 2**30:,.1f} GiB of memory; give fewer or smaller items"
            )
        now = time.monotonic()
        if now - self._told > PATIENCE and launched().rank == 0:
            self._told = now
            self._say(now - self._begin)

    def _say(self, seconds: float) -> None:
        line = f"hpcfed: {self._whose}: {self._count:,} items read"
        if self._total is not None:
            left = (self._total - self._count) * seconds / self._count
            line += f" of {self._total:,}; {left:,.0f} s to go"
        remark(line)


def _each(items: Any) -> Iterator[Any]:
    """Iterate over a data set, by position if it has a length."""
    if not hasattr(items, "__len__"):
        yield from items
        return
    # A torch data set may not raise IndexError at its end, so do not iterate over it.
    for position in range(len(items)):
        yield items[position]


def _array(name: str, what: str, value: Any) -> np.ndarray:
    """Return a numpy or torch array, a list or an image as a numpy array."""
    with plugins.one_line_of(f"data set {name}: {what} is not an array"):
        if hasattr(value, "detach"):
            value = value.detach().cpu().numpy()
        array = np.asarray(value)
    if array.dtype.hasobject:
        raise UserError(
            f"data set {name}: {what} holds Python objects; give plain numbers or texts"
        )
    return array
