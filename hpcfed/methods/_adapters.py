"""Shared by methods about adapters (--lora): W + (α / r) B A in every adapted layer.

A row's columns belong to a factor, A [r, inputs] or B [outputs, r], and there to one of
r components: row k of A and column k of B. Columns of layers that are trained as a whole
(--lora-train) belong to neither.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from hpcfed import options
from hpcfed.errors import UserError
from hpcfed.methods._interface import Entry, Federation, Layout, Tensor
from hpcfed.options import Choice, RunConfig

RANK = 8
"""The usual rank."""


class Options(options.Options):
    names_layers = True
    whole_rows = False

    def fit(self, config: RunConfig, ranks: int) -> Iterable[Choice]:
        yield from super().fit(config, ranks)
        if config.lora is None:
            reason = f"{config.method} is about adapters; --lora takes other ranks"
            yield Choice("lora", RANK, reason)

    def check_layout(self, layout: Layout, network: str) -> None:
        if not adapters(layout):
            raise UserError(
                f"model {network} has no adapters, which the method is about; add "
                f"--lora {RANK}"
            )


class Adapter(NamedTuple):
    """The two factors of an adapted layer."""

    a: Entry
    b: Entry

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def factors(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return A [clients, r, inputs] and B [clients, outputs, r] of rows."""
        a = self.a.shaped(rows[:, self.a.start : self.a.stop])
        return a, self.b.shaped(rows[:, self.b.start : self.b.stop])

    def products(self, rows: Tensor) -> Tensor:
        """Return B A of every row, flattened."""
        a, b = self.factors(rows)
        # In float64, which no GPU rounds to TensorFloat-32.
        return (b.double() @ a.double()).flatten(1).to(rows.dtype)


def adapters(layout: Layout) -> list[Adapter]:
    """Return the adapters of a layout."""
    named = {e.name: e for e in layout.entries}
    found = []
    for e in layout.entries:
        # As `LoraLinear` and `LoraWeight` name them.
        for ours, theirs in ((".down.weight", ".up.weight"), (".down", ".up")):
            other = named.get(e.name.removesuffix(ours) + theirs)
            if e.name.endswith(ours) and other is not None and _fit(e, other):
                found.append(Adapter(e, other))
    return found


def _fit(a: Entry, b: Entry) -> bool:
    """Tell whether these are factors of a matrix; a network may have layers of the same
    names.
    """
    trained = a.trainable and b.trainable
    matrices = len(a.shape) == len(b.shape) == 2
    return trained and matrices and a.shape[0] == b.shape[1]


def columns_of(layout: Layout, factor: str) -> Tensor:
    """Return a mask of the columns of all A, or of all B, on the host."""
    mask = torch.zeros(layout.num_columns, dtype=torch.bool)
    for adapter in adapters(layout):
        e = adapter.a if factor == "A" else adapter.b
        mask[e.start : e.stop] = True
    return mask


def components(layout: Layout) -> Tensor:
    """Return the component of every column, counted from 1; 0 for other columns."""
    found = torch.zeros(layout.num_columns, dtype=torch.int64)
    for adapter in adapters(layout):
        each = torch.arange(1, adapter.rank + 1)
        a, b = adapter
        found[a.start : a.stop] = each.repeat_interleave(a.shape[1])
        found[b.start : b.stop] = each.repeat(b.shape[0])
    return found


def rank_of(fed: Federation) -> int:
    """Return the rank of the run's adapters."""
    assert fed.config.lora is not None
    return fed.config.lora
