"""What a generated row must beat: the rivals of pFedGPA's inversion."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

from hpcfed.methods._generating import Options
from hpcfed.methods._interface import Federation, Positions, Tensor

INVERSIONS = 8
"""How many inversions the mean of inversions is of."""
Request: TypeAlias = Callable[[Positions], tuple[Tensor, Positions]]
"""Asks the server for these clients' columns; returns them, and which clients it knows.
"""


def requests(fed: Federation[Options]) -> Iterator[tuple[str, Request]]:
    """Yield the rivals that the server makes from its bank, by name."""
    server = fed.server
    yield "mean of uploads", server.average
    yield "shrunk mean", server.shrink
    yield "halfway mean", server.halfway
    yield "inverted mean", server.invert_average
    several = partial(server.average_inversions, number=INVERSIONS)
    yield "mean of inversions", several


def noisy(fed: Federation[Options], uploads: Tensor, generated: Tensor) -> Tensor:
    """Return uploads plus Gaussian noise as long as their distance to the generated
    columns.
    """
    noise = uploads.new_empty(uploads.shape)
    for row, client in zip(noise, fed.clients.tolist(), strict=True):
        # One stream per client, so that the noise does not depend on ranks.
        random = fed.generator("noise beside uploads", client)
        row.copy_(row.new_tensor(random.standard_normal(len(row))))
    length = (generated - uploads).norm(dim=1, keepdim=True)
    return uploads + noise * length / noise.norm(dim=1, keepdim=True)
