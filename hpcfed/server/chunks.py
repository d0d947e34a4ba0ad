"""Rows through a network a few at a time, so that activations fit into memory."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

AT_ONCE = 2**28
"""Numbers of one activation: a gigabyte in float32."""


def in_chunks(call: Callable[..., Tensor], *inputs: Tensor, widest: int) -> Tensor:
    """Return the call's results for all inputs, made in few chunks.

    `widest` are the numbers of one sample's largest activation.
    """
    # A single sample always passes, however wide it is.
    most = max(1, AT_ONCE // widest)
    results = []
    for chunk in chunks(len(inputs[0]), most):
        selected = [values[chunk] for values in inputs]
        result = call(*selected)
        results.append(result)
    return torch.cat(results)


def chunks(count: int, most: int) -> Iterator[slice]:
    """Yield few slices of nearly equal size, of at most so many."""
    number = -(-count // most)
    begin = 0
    for i in range(1, number + 1):
        end = i * count // number
        yield slice(begin, end)
        begin = end
