"""A step of SGD in a single pass over rows: the gradient of the terms that draw them to
references, momentum, decay, the step, and the rows rounded for the next step.

With one operation after the other, a step of a large network takes three times as many
passes over its rows. The terms need norms of the rows before the step: the previous
step has summed them up.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from hpcfed.kernels import cuda, pull
from hpcfed.kernels.pull import THREADS, Spans, Strengths
from hpcfed.kernels.sgd import Rule


@dataclass(frozen=True)
class Terms:
    """What draws rows to references, and how far they are; all are [clients, …]."""

    strengths: Strengths
    reference: Tensor
    mask: Tensor | None
    """Booleans; None without a masked term."""
    plain: Tensor
    """[clients, chunks]: sums of squared differences."""
    masked: Tensor
    """[clients, chunks]: sums of squared differences where the mask is True."""


@torch.no_grad()
def measure(rows: Tensor, terms: Terms, spans: Spans) -> None:
    """Sum up how far the rows are from their references, before the first step."""
    sums, _, _ = pull.kernels(terms.strengths, rows.device.index)
    clients, columns = rows.shape
    found = (terms.plain, terms.masked)
    grid = (spans.chunks, clients)
    sums(grid, rows, terms.reference, terms.mask, *found, spans.starts, columns)


@torch.no_grad()
def descend(
    rows: Tensor,
    gradient: Tensor,
    velocity: Tensor | None,
    lr: Tensor,
    rule: Rule,
    spans: Spans,
    *,
    terms: Terms | None = None,
    halves: Tensor | None = None,
) -> None:
    """Take a step with rows [clients, columns] in place; all matrices are contiguous.

    `lr` is one number, or one per client. `halves` become the new rows in bfloat16. The
    gradient does not change.
    """
    clients, columns = rows.shape
    layers = len(spans.layers)
    found = None
    of_terms: tuple[Tensor | None, ...] = (None, None, None, None, None)
    if terms is not None:
        # As in `pull`: a slope per layer, one for the row, one for masked columns.
        found = rows.new_empty(clients, layers + 2)
        _, slopes, _ = pull.kernels(terms.strengths, rows.device.index)
        heads = (layers + 2, clients)
        sums = (terms.plain, terms.masked)
        slopes(heads, *sums, found, spans.first_chunks, spans.chunks)
        of_terms = (terms.reference, terms.mask, found, *sums)
    strengths = None if terms is None else terms.strengths
    kernel = _kernel(
        rule, strengths, halves is not None, lr.dim() > 0, rows.device.index
    )
    # While it writes the new rows, it also sums up their distances for the next step.
    places = (spans.starts, spans.layer_of, columns, layers)
    grid = (spans.chunks, clients)
    kernel(grid, rows, gradient, velocity, lr, *of_terms, halves, *places)


def serves(rows: Tensor, spans: Spans, rule: Rule) -> bool:
    """Whether the kernel supports such steps; clipping needs an extra pass before."""
    return not rule.clip and pull.serves(rows, spans)


@cache
def _kernel(
    rule: Rule, strengths: Strengths | None, halves: bool, rate_each: bool, device: int
) -> cuda.Kernel:
    macros = one_pass_macros(rule, strengths, halves=halves, rate_each=rate_each)
    return cuda.Kernel("one_pass.cu", "descend", macros, threads=THREADS)


def one_pass_macros(
    rule: Rule, strengths: Strengths | None, *, halves: bool, rate_each: bool
) -> cuda.Macros:
    """Return the macros of the kernel; without strengths there is no pull."""
    pulled = strengths or Strengths()
    return (
        ("THREADS", THREADS),
        ("PULLED", int(strengths is not None)),
        ("MASKED", int(pulled.masked > 0)),
        ("SQUARED", f"{float(pulled.squared)!r}f"),
        *rule.macros,
        ("RATE_EACH", int(rate_each)),
        ("HALVES", int(halves)),
    )
