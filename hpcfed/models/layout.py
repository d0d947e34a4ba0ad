"""The layout: which columns of a federation's matrix hold which tensor of the network.

Parameters come first, in the network's own order, then the running statistics of batch norm; so the columns that
gradients touch are `rows[:, :layout.num_parameters]`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Entry:
    """One named tensor and its columns."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    trainable: bool

    @property
    def layer(self) -> str:
        """The module that owns the tensor: `conv1` for `conv1.weight`."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Layout:
    entries: tuple[Entry, ...]
    head: str
    """Name of the last layer with weights; everything else is the body."""

    @classmethod
    def of(cls, network: nn.Module) -> "Layout":
        statistics = {name: b for name, b in network.named_buffers() if b.is_floating_point()}
        tensors: list[tuple[str, Tensor, bool]] = [(name, p, True) for name, p in network.named_parameters()]
        tensors += [(name, b, False) for name, b in statistics.items()]
        entries, start = [], 0
        for name, tensor, trainable in tensors:
            stop = start + tensor.numel()
            entries.append(Entry(name, tuple(tensor.shape), start, stop, trainable))
            start = stop
        head = [e.layer for e in entries if e.trainable][-1]
        return cls(tuple(entries), head)

    @property
    def num_columns(self) -> int:
        return self.entries[-1].stop

    @cached_property
    def num_parameters(self) -> int:
        return sum(prod(e.shape) for e in self.entries if e.trainable)

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that own tensors, in the network's order."""
        return tuple(dict.fromkeys(e.layer for e in self.entries))

    def row(self, network: nn.Module, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The network's tensors as one row."""
        tensors = network.state_dict()
        return torch.cat([tensors[e.name].detach().flatten().to(dtype) for e in self.entries])

    def views(self, rows: Tensor, statistics: Tensor | None = None) -> dict[str, Tensor]:
        """Every tensor as a view [clients, *shape] of the rows; running statistics of their own matrix, if given."""
        parameters = self.num_parameters
        parts = (rows[:, :parameters], rows[:, parameters:] if statistics is None else statistics)
        return {
            e.name: parts[not e.trainable][:, e.start - offset : e.stop - offset].unflatten(1, e.shape)
            for e in self.entries
            for offset in (0 if e.trainable else parameters,)
        }

    def mask(self, layers: Iterable[str]) -> Tensor:
        """True at the columns of these layers."""
        wanted = set(layers)
        unknown = wanted - set(self.layers)
        assert not unknown, f"no such layers: {sorted(unknown)}"
        mask = torch.zeros(self.num_columns, dtype=torch.bool)
        for e in self.entries:
            mask[e.start : e.stop] = e.layer in wanted
        return mask
