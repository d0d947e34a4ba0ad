"""The gradient of terms that draw rows to references, in two passes over memory if a
GPU allows. torch's own operations take seven, and two launches for every layer.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from hpcfed.kernels import cuda

SMOOTHING = 1e-12
"""Added under the root of every norm, so that it has a gradient at zero."""
CHUNK = 8192
"""Columns that a block of threads processes."""
THREADS = 256


class Strengths(NamedTuple):
    """The factor of each term in the loss."""

    layers: float = 0.0
    """Σ ‖θ − reference‖₂ over the layers, each with its batch norm."""
    whole: float = 0.0
    """‖θ − reference‖₂ over all parameters."""
    masked: float = 0.0
    """‖mask ⊙ (θ − reference)‖₂."""
    squared: float = 0.0
    """½ ‖θ − reference‖₂² over all parameters, as in FedProx."""


class Spans:
    """The columns of each layer in a row, and the chunks that a GPU cuts them into."""

    def __init__(self, layers: Sequence[tuple[int, int]], device: torch.device) -> None:
        """`layers` are consecutive, without gaps, from column 0 on."""
        self.layers = list(layers)
        starts: list[int] = []
        layer_of = []
        first_chunks = []
        for number, (start, stop) in enumerate(self.layers):
            first_chunks.append(len(starts))
            chunks = range(start, stop, CHUNK)
            starts += chunks
            layer_of += [number] * len(chunks)
        first_chunks.append(len(starts))
        self.chunks = len(starts)
        # One more than there are chunks, so that chunk i ends where chunk i + 1 starts.
        starts.append(self.layers[-1][1])
        self.starts = torch.tensor(starts, dtype=torch.int32, device=device)
        self.layer_of = torch.tensor(layer_of, dtype=torch.int32, device=device)
        self.first_chunks = torch.tensor(first_chunks, dtype=torch.int32, device=device)


@torch.no_grad()
def add_pull(
    rows: Tensor,
    reference: Tensor,
    mask: Tensor | None,
    gradient: Tensor,
    spans: Spans,
    strengths: Strengths,
) -> None:
    """Add the gradient of all terms to `gradient`, in place. All are [clients, columns]
    and contiguous. `mask` has booleans; it is None without a masked term.
    """
    if serves(rows, spans):
        _launch(rows, reference, mask, gradient, spans, strengths)
        return
    difference = rows - reference
    if strengths.layers:
        _add_layers(difference, gradient, spans, strengths.layers)
    if strengths.whole:
        norms = vector_norm(difference, dim=1, keepdim=True)
        gradient.addcmul_(difference, _slope(strengths.whole, norms))
    if strengths.squared:
        gradient.add_(difference, alpha=strengths.squared)
    if mask is not None:
        # Last, because it overwrites the difference.
        difference *= mask
        norms = vector_norm(difference, dim=1, keepdim=True)
        gradient.addcmul_(difference, _slope(strengths.masked, norms))


def _add_layers(
    difference: Tensor, gradient: Tensor, spans: Spans, strength: float
) -> None:
    # Only two operations per layer, a norm and an addcmul: networks have many layers.
    norms = []
    for start, stop in spans.layers:
        norms.append(vector_norm(difference[:, start:stop], dim=1))
    slopes = _slope(strength, torch.stack(norms)).unsqueeze(2)
    for (start, stop), slope in zip(spans.layers, slopes, strict=True):
        layer_difference = difference[:, start:stop]
        gradient[:, start:stop].addcmul_(layer_difference, slope)


def _slope(strength: float, norm: Tensor) -> Tensor:
    """Return the factor from a difference to the gradient of strength × norm."""
    # ∂ s √(‖d‖² + ε) / ∂d = s d / √(‖d‖² + ε)
    return strength / (norm.square() + SMOOTHING).sqrt()


def serves(rows: Tensor, spans: Spans) -> bool:
    """Whether threads can load four floats at once, wherever a layer begins or ends."""
    if rows.dtype != torch.float32 or not cuda.available(rows.device):
        return False
    return not any(start % 4 or stop % 4 for start, stop in spans.layers)


def _launch(
    rows: Tensor,
    reference: Tensor,
    mask: Tensor | None,
    gradient: Tensor,
    spans: Spans,
    strengths: Strengths,
) -> None:
    clients, columns = rows.shape
    layers = len(spans.layers)
    sums, slopes, add = kernels(strengths, rows.device.index)
    plain = rows.new_empty(clients, spans.chunks)
    masked = torch.empty_like(plain)
    # One per layer, one for the whole row, and one for the masked columns.
    found = rows.new_empty(clients, layers + 2)
    grid = (spans.chunks, clients)
    sums(grid, rows, reference, mask, plain, masked, spans.starts, columns)
    heads = (layers + 2, clients)
    slopes(heads, plain, masked, found, spans.first_chunks, spans.chunks)
    places = (spans.starts, spans.layer_of, columns, layers)
    add(grid, rows, reference, mask, found, gradient, *places)


@cache
def kernels(
    strengths: Strengths, device: int
) -> tuple[cuda.Kernel, cuda.Kernel, cuda.Kernel]:
    """Return kernels that sum differences, make slopes, and add the pull."""
    settings = macros(strengths)
    return (
        cuda.Kernel("pull.cu", "sums", settings, threads=THREADS),
        cuda.Kernel("pull.cu", "slopes", settings, threads=32),
        cuda.Kernel("pull.cu", "add", settings, threads=THREADS),
    )


def macros(strengths: Strengths) -> cuda.Macros:
    """Return the macros of pull.cu."""
    made: cuda.Macros = (("THREADS", THREADS), ("SMOOTHING", f"{SMOOTHING!r}f"))
    for name, strength in strengths._asdict().items():
        made += ((name.upper(), f"{float(strength)!r}f"),)
    return made
