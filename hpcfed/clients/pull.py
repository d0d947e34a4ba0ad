"""Terms of a client's loss, besides the cross-entropy, that draw its row to a
reference.

A term is a norm of their difference d, or half its square. A norm is √(‖d‖² + 1e-12),
so that it has a gradient even if the two are equal.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hpcfed.kernels import one_pass
from hpcfed.kernels.one_pass import Terms
from hpcfed.kernels.pull import Spans, Strengths, add_pull
from hpcfed.models.kernel_layout import KernelLayout, KernelRows

__all__ = ["Pull", "StackPull", "Strengths", "merge_pulls"]


@dataclass(frozen=True)
class Pull:
    """Draws the rows of some clients to their references."""

    strengths: Strengths
    reference: Tensor
    """A row per client."""
    mask: Tensor | None = None
    """A row of booleans per client: True where the masked term applies."""

    def subset(self, clients: Tensor) -> "Pull":
        """Return the pull of the clients at these positions."""
        mask = None if self.mask is None else self.mask[clients]
        return replace(self, reference=self.reference[clients], mask=mask)

    def mergeable(self, other: "Pull | None") -> bool:
        """Whether both can be merged into one pull."""
        if other is None or self.strengths != other.strengths:
            return False
        return (self.mask is None) == (other.mask is None)


def merge_pulls(pulls: list[Pull]) -> Pull:
    """Merge pulls with equal strengths into one for all their clients."""
    reference = torch.cat([pull.reference for pull in pulls])
    masks = [pull.mask for pull in pulls if pull.mask is not None]
    return Pull(pulls[0].strengths, reference, torch.cat(masks) if masks else None)


class StackPull:
    """References and masks of the stack in training, in the kernels' layout.

    Their memory stays in place, because captured steps read it.
    """

    def __init__(self, strengths: Strengths, layout: KernelLayout) -> None:
        self._strengths = strengths
        self._layout = layout

    def reserve(self, clients: int, like: Tensor) -> None:
        """Allocate memory for stacks of `clients` clients."""
        # Statistics get memory, too, although nothing draws them: rows load as a whole.
        self._reference = self._layout.zeros(clients, like)
        self.spans = Spans(self._layout.block_spans, like.device)
        self._mask = None
        if self._strengths.masked:
            self._mask = self._layout.zeros(clients, like.bool())
        self._sums = like.new_zeros(2, clients, self.spans.chunks)

    def load(self, pull: Pull) -> None:
        """Copy the references and masks of a stack's clients into that memory."""
        self._load(pull.reference, self._reference)
        if self._mask is not None:
            assert pull.mask is not None, "a masked term needs a mask"
            self._load(pull.mask, self._mask)

    def _load(self, rows: Tensor, memory: KernelRows) -> None:
        """Copy rows into the first rows of the memory, which may hold more clients."""
        parameters, statistics = memory
        count = len(rows)
        self._layout.load(rows, (parameters[:count], statistics[:count]))

    def add(self, rows: Tensor, gradient: Tensor) -> None:
        """Add the gradient of all terms, in place, to that of the first clients' rows.

        Frozen columns get it, too, but their gradient is not used.
        """
        count = len(rows)
        mask = None if self._mask is None else self._mask[0][:count]
        reference = self._reference[0][:count]
        add_pull(rows, reference, mask, gradient, self.spans, self._strengths)

    def measure(self, rows: Tensor) -> None:
        """Sum up how far the first clients' rows are from their references."""
        one_pass.measure(rows, self.terms(len(rows)), self.spans)

    def terms(self, count: int) -> Terms:
        """Return the terms of the first clients, for steps in one pass."""
        # Views: every step writes its sums there for the next one.
        plain, masked = self._sums[:, :count]
        mask = None if self._mask is None else self._mask[0][:count]
        return Terms(self._strengths, self._reference[0][:count], mask, plain, masked)
