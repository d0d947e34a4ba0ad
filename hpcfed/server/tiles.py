"""Large linear layers in tiles, so that ZeRO 3 never holds a whole one.

ZeRO 3 gathers a module's parameters, and reduces their gradients, as a whole. Two
layers hold 92 % of p-diff's autoencoder, so that there was little left to share. A tile
is a module of its own: it is gathered, used and released before the next one.

Tiles exist only during training. Layers are drawn, saved and used as a whole.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn

TILE = 2**24
"""The most parameters of a tile. Its gradient's norm, for which DeepSpeed needs the most
memory, takes 8 bytes each: 128 MiB. Smaller tiles would save little and send more often.
"""
_NAME = re.compile(r"(.+)\.(input|output)_tiles\.\d+\.(weight|bias)")


class SummedTiles(nn.Module):
    """A linear layer whose tiles take some inputs each; their results are added."""

    def __init__(self, layer: nn.Linear, most: int) -> None:
        super().__init__()
        edges = _edges(layer.in_features, layer.out_features, most)
        self._widths = [end - begin for begin, end in pairwise(edges)]
        self.input_tiles = nn.ModuleList()
        for begin, end in pairwise(edges):
            # The sum has the bias once.
            bias = None if begin else layer.bias
            self.input_tiles.append(_linear(layer.weight[:, begin:end], bias))

    def forward(self, x: Tensor) -> Tensor:
        parts = x.split(self._widths, -1)
        total: Tensor = self.input_tiles[0](parts[0])
        for tile, part in zip(self.input_tiles[1:], parts[1:], strict=True):
            total = total + tile(part)
        return total


class JoinedTiles(nn.Module):
    """A linear layer whose tiles make some outputs each."""

    def __init__(self, layer: nn.Linear, most: int) -> None:
        super().__init__()
        edges = _edges(layer.out_features, layer.in_features, most)
        self.output_tiles = nn.ModuleList()
        for begin, end in pairwise(edges):
            bias = None if layer.bias is None else layer.bias[begin:end]
            self.output_tiles.append(_linear(layer.weight[begin:end], bias))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([tile(x) for tile in self.output_tiles], -1)


def in_tiles(layer: nn.Linear, most: int) -> nn.Module:
    """Return the layer in tiles of at most about `most` parameters, cut along its longer
    side; the layer itself if one tile is enough.
    """
    if layer.weight.numel() <= most:
        return layer
    if layer.in_features > layer.out_features:
        return SummedTiles(layer, most)
    return JoinedTiles(layer, most)


def joined(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors with those of tiles put together again, under the names of the
    whole layers.

    Tiles wait on the host, since a whole layer may not fit beside what ZeRO holds.
    """
    pieces: dict[str, list[Tensor]] = defaultdict(list)
    side: dict[str, int] = {}
    for name, tensor in tensors:
        found = _NAME.fullmatch(name)
        if found is None:
            yield name, tensor
            continue
        layer, cut, kind = found.groups()
        whole = f"{layer}.{kind}"
        pieces[whole].append(tensor.cpu())
        # Weights are [outputs, inputs].
        side[whole] = 1 if kind == "weight" and cut == "input" else 0
    for name, parts in pieces.items():
        yield name, torch.cat(parts, side[name])


def _edges(length: int, other: int, most: int) -> list[int]:
    """Cut a side into as few tiles as possible, of nearly equal width."""
    widest = max(1, most // other)
    number = -(-length // widest)
    return [i * length // number for i in range(number + 1)]


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a layer with copies of these numbers, without drawing any."""
    outputs, inputs = weight.shape
    with torch.device("meta"):
        layer = nn.Linear(inputs, outputs, bias=bias is not None)
    # Copies, so that the whole layer can be freed.
    layer.weight = nn.Parameter(
        weight.detach().clone(memory_format=torch.contiguous_format)
    )
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone())
    return layer
