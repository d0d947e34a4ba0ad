"""The layout: which columns of a federation's matrix hold which tensor of the network.

Parameters come first, in the network's own order, then the running statistics of batch
norm; so the columns that gradients touch are `rows[:, :layout.num_parameters]`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Layout:
    entries: tuple[Entry, ...]
    head: str
    """Name of the last layer with weights; everything else is the body."""

    @classmethod
    def of(cls, network: nn.Module) -> "Layout":
        statistics = {
            name: b for name, b in network.named_buffers() if b.is_floating_point()
        }
        tensors: list[tuple[str, Tensor, bool]] = [
            (name, p, True) for name, p in network.named_parameters()
        ]
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

    @cached_property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        """Convolutions and linear layers, each with the batch norm that follows it."""
        weighty = {e.layer for e in self.entries if len(e.shape) > 1}
        places = [place for place, layer in enumerate(self.layers) if layer in weighty]
        return tuple(
            self.layers[start:stop]
            for start, stop in pairwise([*places, len(self.layers)])
        )

    @cached_property
    def block_of(self) -> Tensor:
        """The number of the block that every column belongs to."""
        number = {
            layer: block for block, layers in enumerate(self.blocks) for layer in layers
        }
        return torch.cat(
            [torch.full((prod(e.shape),), number[e.layer]) for e in self.entries]
        )

    @property
    def block_spans(self) -> list[tuple[int, int]]:
        """Where each block begins and ends among the parameters, which follow block by
        block.
        """
        return _block_spans(self.blocks, self.entries, self.num_parameters)

    def last(self, count: int) -> tuple[str, ...]:
        """The layers of the last so many blocks."""
        assert count <= len(self.blocks), f"{count} of {len(self.blocks)} layers"
        return tuple(chain(*self.blocks[len(self.blocks) - count :]))

    def row(self, network: nn.Module, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The network's tensors as one row."""
        tensors = network.state_dict()
        return torch.cat(
            [tensors[e.name].detach().flatten().to(dtype) for e in self.entries]
        )

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """Every tensor as a view [clients, *shape] of the rows."""
        return {
            e.name: rows[:, e.start : e.stop].unflatten(1, e.shape)
            for e in self.entries
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


def _block_spans(
    blocks: Iterable[Sequence[str]], entries: Iterable[Entry], width: int
) -> list[tuple[int, int]]:
    first = {block[0] for block in blocks}
    starts = [e.start for e in entries if e.layer in first and len(e.shape) > 1]
    return list(pairwise([*starts, width]))


Work = tuple[Tensor, Tensor]
"""Parameters and running statistics of rows at work."""


class Workplace:
    """The same rows as the kernels like them: every tensor aligned, and weights of
    convolutions channels-last.

    Parameters and running statistics are matrices of their own. Columns without meaning
    may lie between the tensors; they are zero at first, and stay so as long as a row is
    finite. On the CPU tensors lie as in the plain rows.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.plain = layout
        self._channels_last = device.type == "cuda"
        align = 4 if self._channels_last else 1  # floats: 16 bytes
        self.widths = [0, 0]
        """Columns of the two matrices."""
        self.entries = []
        for e in layout.entries:
            part = int(not e.trainable)
            start, stop = self.widths[part], self.widths[part] + prod(e.shape)
            self.entries.append(replace(e, start=start, stop=stop))
            self.widths[part] = -(-stop // align) * align

    @property
    def padded(self) -> bool:
        """Whether parameters have columns without meaning between them."""
        return self.widths[0] > self.plain.num_parameters

    @property
    def block_spans(self) -> list[tuple[int, int]]:
        """As the layout's, here; a block ends with the columns without meaning that
        follow it.
        """
        return _block_spans(self.plain.blocks, self.entries, self.widths[0])

    def new(self, clients: int, like: Tensor) -> Work:
        """Both matrices, all zero."""
        parameters, statistics = (
            like.new_zeros(clients, width) for width in self.widths
        )
        return parameters, statistics

    def view(self, matrix: Tensor, e: Entry) -> Tensor:
        """One tensor as a view [clients, *shape] of the matrix that holds it."""
        columns = matrix[:, e.start : e.stop]
        if self._channels_last and len(e.shape) == 4:
            outputs, inputs, height, width = e.shape
            return columns.unflatten(1, (outputs, height, width, inputs)).permute(
                0, 1, 4, 2, 3
            )
        return columns.unflatten(1, e.shape)

    def views(self, parameters: Tensor, statistics: Tensor) -> dict[str, Tensor]:
        """Every tensor by name."""
        return {
            e.name: self.view(parameters if e.trainable else statistics, e)
            for e in self.entries
        }

    def load(self, rows: Tensor, work: Work) -> None:
        """Brings plain rows to the workplace."""
        for there, here in self._pairs(rows, *work):
            here.copy_(there)

    def store(self, work: Work, rows: Tensor) -> None:
        """And back."""
        for there, here in self._pairs(rows, *work):
            there.copy_(here)

    def _pairs(
        self, rows: Tensor, parameters: Tensor, statistics: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        if not self._channels_last:
            yield rows[:, : self.widths[0]], parameters
            if self.widths[1]:
                yield rows[:, self.widths[0] :], statistics
            return
        for plain, e in zip(self.plain.entries, self.entries, strict=True):
            there = rows[:, plain.start : plain.stop].unflatten(1, plain.shape)
            yield there, self.view(parameters if e.trainable else statistics, e)
