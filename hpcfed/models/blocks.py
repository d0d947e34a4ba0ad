"""The blocks of a transformer: equal modules, one after the other.

What holds for two of them holds for all. So a large network is tried out with fewer.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from hpcfed.models.frozen import own_copies

LARGE = 50_000_000
"""Parameters from which on a network is tried out with fewer blocks."""
EACH = 2
"""Blocks of a kind that a trial has: what a block passes on enters another one."""
NUMBERS = ("layer_idx", "layer_id", "layer_index")
"""Attributes in which equal blocks differ: their own number."""


@dataclass(frozen=True)
class Blocks:
    """Where a network has its blocks, and which of them are equal."""

    name: str
    """The list that holds them, such as `model.layers`."""
    kinds: tuple[int, ...]
    """The number of every block's kind; equal blocks are of one kind."""

    def of(self, network: nn.Module) -> list[nn.Module]:
        """Return the blocks of the network, or of a copy."""
        return list(network.get_submodule(self.name).children())

    @property
    def alike(self) -> bool:
        """Whether all blocks are of one kind."""
        return set(self.kinds) == {0}


def is_of_transformers(module: nn.Module) -> bool:
    """Tell whether a module's class is one of Hugging Face's."""
    return type(module).__module__.startswith("transformers.")


def find_blocks(network: nn.Module) -> Blocks | None:
    """Return the blocks of a network of transformers; None if it has no such list, or
    several.

    Only of transformers: a user's own network may do anything with its fourth block.
    """
    if not is_of_transformers(network):
        return None
    lists = list(_outermost(network, ""))
    if len(lists) != 1:
        return None
    name, blocks = lists[0]
    kinds: dict[object, int] = {}
    numbers = [kinds.setdefault(_kind(block), len(kinds)) for block in blocks]
    return Blocks(name, tuple(numbers))


def _outermost(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.ModuleList]]:
    """Yield lists of modules, but not those inside of others."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            yield prefix + name, child
        else:
            yield from _outermost(child, f"{prefix}{name}.")


def _kind(block: nn.Module) -> object:
    """Return what equal blocks have in common: modules, settings and shapes."""
    found: list[Any] = []
    for name, module in block.named_modules():
        settings = []
        for key, value in sorted(vars(module).items()):
            if key not in NUMBERS and isinstance(value, bool | int | float | str):
                settings.append((key, value))
        found.append((name, type(module), tuple(settings)))
    for name, parameter in block.named_parameters():
        found.append((name, parameter.shape, parameter.requires_grad))
    for name, buffer in block.named_buffers():
        found.append((name, buffer.shape))
    return tuple(found)


def is_large(network: nn.Module) -> bool:
    """Tell whether a network should be tried out with fewer blocks."""
    return sum(p.numel() for p in network.parameters()) >= LARGE


def shortened(
    network: nn.Module, blocks: Blocks, each: int = EACH, *, share: bool = False
) -> nn.Module:
    """Return a copy of a network with the first blocks of every kind. Unless it may
    `share` frozen weights, their type may be changed.
    """
    there = network.get_submodule(blocks.name)
    kept = []
    for number, (kind, block) in enumerate(
        zip(blocks.kinds, there.children(), strict=True)
    ):
        if blocks.kinds[:number].count(kind) < each:
            kept.append(block)
    dropped = [block for block in there.children() if block not in kept]
    memo = {} if share else own_copies(network, without=dropped)
    # Where the copy meets the long list, it takes the short one.
    memo[id(there)] = nn.ModuleList(copy.deepcopy(kept, memo))
    short: nn.Module = copy.deepcopy(network, memo)
    return short
