"""The layout: which columns of a federation's matrix hold which tensor of the network.

Parameters come first, in the network's own order, then the running statistics of batch
norm. So the columns that gradients touch are `rows[:, :layout.num_parameters]`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
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

    @property
    def is_matrix(self) -> bool:
        """Whether this is the weight of a convolution or linear layer."""
        return len(self.shape) > 1


@dataclass(frozen=True)
class Layout:
    entries: tuple[Entry, ...]
    head: str
    """Name of the last layer with weights; everything else is the body."""

    @classmethod
    def of(cls, network: nn.Module) -> "Layout":
        tensors: list[tuple[str, Tensor, bool]] = []
        for name, parameter in network.named_parameters():
            tensors.append((name, parameter, True))
        for name, buffer in network.named_buffers():
            # Batch norm also counts its batches, in an integer that nobody averages.
            if buffer.is_floating_point():
                tensors.append((name, buffer, False))
        entries = []
        start = 0
        for name, tensor, trainable in tensors:
            stop = start + tensor.numel()
            shape = tuple(tensor.shape)
            entries.append(Entry(name, shape, start, stop, trainable))
            start = stop
        # Statistics come last, but the head is the last layer with parameters.
        trainable_entries = [e for e in entries if e.trainable]
        return cls(tuple(entries), head=trainable_entries[-1].layer)

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

    @cached_property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        """Convolutions and linear layers, each with the batch norm that follows it."""
        # A batch norm has no matrix, so it joins the block before it.
        with_weights = {e.layer for e in self.entries if e.is_matrix}
        layers = self.layers
        starts = [i for i, layer in enumerate(layers) if layer in with_weights]
        bounds = pairwise([*starts, len(layers)])
        return tuple(layers[start:stop] for start, stop in bounds)

    @cached_property
    def block_of(self) -> Tensor:
        """The number of the block that every column belongs to."""
        number = {}
        for block, layers in enumerate(self.blocks):
            number.update(dict.fromkeys(layers, block))
        block_of = torch.empty(self.num_columns, dtype=torch.int64)
        for e in self.entries:
            block_of[e.start : e.stop] = number[e.layer]
        return block_of

    @property
    def block_spans(self) -> list[tuple[int, int]]:
        """Where each block starts and stops among the parameters."""
        return block_spans(self.blocks, self.entries, self.num_parameters)

    def last(self, count: int) -> tuple[str, ...]:
        """Return the layers of the last `count` blocks."""
        num_blocks = len(self.blocks)
        assert count <= num_blocks, f"{count} of {num_blocks} layers"
        # Not [-count:], which would be all of them for 0.
        last_blocks = self.blocks[num_blocks - count :]
        return tuple(chain(*last_blocks))

    def row(self, network: nn.Module, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the network's tensors as one row."""
        # Without the counter of batch norm, which has no entry.
        tensors = network.state_dict()
        pieces = []
        for e in self.entries:
            tensor = tensors[e.name].detach()
            pieces.append(tensor.flatten().to(dtype))
        return torch.cat(pieces)

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """Return every tensor as a view [clients, *shape] of the rows."""
        named = {}
        for e in self.entries:
            columns = rows[:, e.start : e.stop]
            named[e.name] = columns.unflatten(1, e.shape)
        return named

    def mask(self, layers: Iterable[str]) -> Tensor:
        """Return booleans per column, True at the columns of these layers."""
        wanted = set(layers)
        unknown = wanted - set(self.layers)
        assert not unknown, f"no such layers: {sorted(unknown)}"
        mask = torch.zeros(self.num_columns, dtype=torch.bool)
        for e in self.entries:
            mask[e.start : e.stop] = e.layer in wanted
        return mask


def block_spans(
    blocks: Iterable[Sequence[str]], entries: Iterable[Entry], width: int
) -> list[tuple[int, int]]:
    """Return start and stop of each block among `width` columns of parameters.

    Parameters follow block by block, each block beginning with a weight.
    """
    first_layers = {block[0] for block in blocks}
    starts = []
    for e in entries:
        if e.is_matrix and e.layer in first_layers:
            starts.append(e.start)
    return list(pairwise([*starts, width]))
