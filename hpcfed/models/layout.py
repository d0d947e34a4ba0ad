"""The layout: which columns of a federation's matrix hold which tensor of the network.

Parameters come first, in the network's own order, then what changes without gradients:
the running statistics of batch norm. So the columns that gradients touch are `rows[:,
:layout.num_parameters]`.

A frozen parameter (`requires_grad=False`) has no columns, unless that is asked for: it
is a constant, which all clients share. So have buffers that are not persistent.
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
    def of(cls, network: nn.Module, *, send_frozen: bool = False) -> "Layout":
        """Lay out a network; with `send_frozen` also parameters that never change."""
        tensors: list[tuple[str, Tensor, bool]] = []
        frozen: list[tuple[str, Tensor, bool]] = []
        # A tensor that has two names, as tied weights do, is there once.
        for name, parameter in network.named_parameters():
            if parameter.requires_grad:
                tensors.append((name, parameter, True))
            elif send_frozen:
                frozen.append((name, parameter, False))
        persistent = network.state_dict().keys()
        for name, buffer in network.named_buffers():
            # Batch norm also counts its batches, in an integer that nobody averages.
            if buffer.is_floating_point() and name in persistent:
                tensors.append((name, buffer, False))
        tensors += frozen
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
        # Whatever comes before the first matrix belongs to its block.
        bounds = pairwise([0, *starts[1:], len(layers)])
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

    Parameters follow block by block, as layers do.
    """
    starts: dict[str, int] = {}
    for e in entries:
        if e.trainable:
            starts.setdefault(e.layer, e.start)
    found = []
    for block in blocks:
        of_block = [starts[layer] for layer in block if layer in starts]
        # A block whose parameters are all frozen has no columns there.
        if of_block:
            found.append(min(of_block))
    return list(pairwise([*found, width]))
