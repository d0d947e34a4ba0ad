"""The layout: which columns of a federation's matrix hold which tensor of the network.

Parameters come first, in the network's own order, then what changes without gradients:
the running statistics of batch norm, and other buffers. So gradients only touch the
columns `rows[:, :layout.num_parameters]`.

A buffer of integers or booleans has columns, too. They hold whole numbers while a
client trains. After aggregation they hold a mean, which is rounded when a network takes
it.

A frozen parameter (`requires_grad=False`) has no columns, unless asked for: it is a
constant, which all clients share. The same holds for buffers that are not persistent.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from math import prod

import numpy as np
import torch
from torch import Tensor, nn

from hpcfed.errors import UserError

COUNTER = "num_batches_tracked"
"""Name of the batch counter in torch's norms."""


@dataclass(frozen=True)
class Entry:
    """One named tensor and its columns."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    trainable: bool
    whole: torch.dtype | None = None
    """The type of a buffer of integers or booleans; None for floats."""

    @property
    def layer(self) -> str:
        """The module that owns the tensor: `conv1` for `conv1.weight`."""
        return self.name.rpartition(".")[0]

    @property
    def is_matrix(self) -> bool:
        """Whether this is the weight of a convolution or linear layer."""
        return len(self.shape) > 1

    def shaped(self, columns: Tensor) -> Tensor:
        """Return columns [clients, …] as a view [clients, *shape]."""
        # A scalar has no dimensions to unflatten to.
        return columns.unflatten(1, self.shape) if self.shape else columns.squeeze(1)

    def taken(self, tensor: Tensor) -> Tensor:
        """Return a tensor of rows in the type that the network expects.

        A mean of whole numbers is rounded. A value that is not finite, as in a diverged
        row, becomes the same number on every machine.
        """
        if self.whole is None:
            return tensor
        least, most = 0, 1
        if self.whole != torch.bool:
            limits = torch.iinfo(self.whole)
            bound = largest_whole(tensor.dtype)
            least, most = max(limits.min, -bound), min(limits.max, bound)
        rounded = torch.nan_to_num(tensor.detach(), 0.0).round().clamp(least, most)
        return rounded.to(self.whole)


def uncounted(buffer: Tensor) -> Tensor:
    """Return the same memory with a count of changes of its own.

    torch counts the changes in place of a whole row. A backward pass that needs one
    buffer would refuse to run after a change of another.
    """
    return buffer.data


class Changes:
    """Buffers that a network has changed, if the change is not in the rows yet.

    What a module changes in place is in the rows immediately, unless it has another
    type there. What it assigns anew never is. Both are written after the backward pass,
    which may still need the old values.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, Tensor, bool]] = []

    def note(self, e: Entry, tensor: Tensor, taken: Tensor, changed: Tensor) -> None:
        """Note what happened to a tensor that the network has taken."""
        if e.whole is not None or changed is not taken:
            self._waiting.append((tensor, changed.detach(), e.whole is not None))

    def write(self) -> None:
        """Write what was noted into the rows.

        A whole number too large for the rows becomes infinite, which `check_whole`
        finds.
        """
        for tensor, changed, is_whole in self._waiting:
            tensor.copy_(changed)
            if is_whole:
                is_held = tensor.abs() < largest_whole(tensor.dtype)
                tensor.masked_fill_(~is_held, torch.inf)
        self.forget()

    def forget(self) -> None:
        self._waiting.clear()


def check_whole(layout: "Layout", rows: Tensor) -> None:
    """Refuse whole numbers that have grown beyond what rows can hold exactly."""
    for e in layout.entries:
        if e.whole is not None and bool(rows[:, e.start : e.stop].isinf().any()):
            bits = torch.finfo(rows.dtype).bits
            raise UserError(
                f"the network's buffer {e.name} has reached "
                f"{largest_whole(rows.dtype):,}: rows of float{bits} hold whole numbers "
                "below that"
            )


def largest_whole(dtype: torch.dtype) -> int:
    """Return the number up to which a float type holds all whole numbers exactly."""
    # 2^24 in float32: from there on, neighbouring floats are 2 apart.
    return int(2 / torch.finfo(dtype).eps)


@dataclass(frozen=True)
class Layout:
    entries: tuple[Entry, ...]
    head: str
    """Name of the last layer with weights; everything else is the body."""

    @classmethod
    def of(cls, network: nn.Module, *, send_frozen: bool = False) -> "Layout":
        """Lay out a network; `send_frozen` includes constant parameters."""
        tensors: list[tuple[str, Tensor, bool]] = []
        frozen: list[tuple[str, Tensor, bool]] = []
        # A tensor with two names, such as tied weights, appears once.
        for name, parameter in network.named_parameters():
            if parameter.requires_grad:
                tensors.append((name, parameter, True))
            elif send_frozen:
                frozen.append((name, parameter, False))
        # A state dict has no buffers that are not persistent.
        kept = network.state_dict().keys() - idle_counters(network)
        for name, buffer in network.named_buffers():
            if name in kept:
                tensors.append((name, buffer, False))
        tensors += frozen
        entries = []
        start = 0
        for name, tensor, trainable in tensors:
            stop = start + tensor.numel()
            shape = tuple(tensor.shape)
            whole = None if tensor.is_floating_point() else tensor.dtype
            entries.append(Entry(name, shape, start, stop, trainable, whole))
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
        # Everything before the first matrix belongs to its block.
        bounds = pairwise([0, *starts[1:], len(layers)])
        return tuple(layers[start:stop] for start, stop in bounds)

    @cached_property
    def trained_blocks(self) -> tuple[tuple[str, ...], ...]:
        """The blocks of which something is trained; rows may hold frozen ones, too. The
        two factors of an adapter are one block.
        """
        trained = {e.layer for e in self.entries if e.trainable}
        blocks: list[tuple[str, ...]] = []
        for block in self.blocks:
            if trained.isdisjoint(block):
                continue
            if blocks and self._are_factors(blocks[-1][-1], block[0]):
                blocks[-1] += block
            else:
                blocks.append(block)
        return tuple(blocks)

    def _are_factors(self, down: str, up: str) -> bool:
        """Tell whether two layers are an adapter's, as `LoraLinear` names them."""
        stem, _, last = down.rpartition(".")
        if last != "down" or up != f"{stem}.up":
            return False
        # A network may have two such layers of its own, with biases.
        shapes = [e.shape for e in self.entries if e.layer in (down, up)]
        if [len(shape) for shape in shapes] != [2, 2]:
            return False
        return shapes[0][0] == shapes[1][1]

    @cached_property
    def block_of(self) -> Tensor:
        """The number of each column's block."""
        number = {}
        for block, layers in enumerate(self.blocks):
            number.update(dict.fromkeys(layers, block))
        block_of = torch.empty(self.num_columns, dtype=torch.int64)
        for e in self.entries:
            block_of[e.start : e.stop] = number[e.layer]
        return block_of

    @property
    def block_spans(self) -> list[tuple[int, int]]:
        """Start and stop of each block among the parameters."""
        return block_spans(self.blocks, self.entries, self.num_parameters)

    def last(self, count: int) -> tuple[str, ...]:
        """Return the layers of the last `count` blocks of which something is trained."""
        blocks = self.trained_blocks
        assert count <= len(blocks), f"{count} of {len(blocks)} layers"
        # Not [-count:], which would return all of them for 0.
        return tuple(chain(*blocks[len(blocks) - count :]))

    def row(self, network: nn.Module, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the network's tensors as one row."""
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
            named[e.name] = e.shaped(rows[:, e.start : e.stop])
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

    def trained_by(self, columns: np.ndarray) -> list[str]:
        """Return the names of the parameters that training these columns changes."""
        found = []
        for e in self.entries:
            if e.trainable and columns[e.start : e.stop].any():
                found.append(e.name)
        return found


def idle_counters(network: nn.Module) -> set[str]:
    """Return the buffers in which torch's norms count batches although nothing reads
    them.

    Only a norm whose `momentum` is None uses the count, for its mean over all batches.
    """
    found = set()
    for name, module in network.named_modules():
        # A user's own class may read its counter.
        of_torch = type(module).__module__.startswith("torch.nn.")
        if of_torch and getattr(module, "momentum", None) is not None:
            # The network itself has an empty name.
            found.add(f"{name}.{COUNTER}".lstrip("."))
    return found


def block_spans(
    blocks: Iterable[Sequence[str]], entries: Iterable[Entry], width: int
) -> list[tuple[int, int]]:
    """Return start and stop of each block among `width` columns of parameters.

    Parameters are ordered by block, like layers.
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
