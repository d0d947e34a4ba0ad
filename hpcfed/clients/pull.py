"""What a client's loss may have beside the cross-entropy: terms that draw its row
towards a reference.

Each is the norm of what lies between them, √(‖·‖² + 1e-12), so that it has a gradient
where the two are equal.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from hpcfed.models.layout import Workplace

_LEAST = 1e-12


class Strengths(NamedTuple):
    """What each term counts for in the loss."""

    layers: float = 0.0
    """Σ ‖θ − reference‖₂ over the layers, each with its batch norm."""
    whole: float = 0.0
    """‖θ − reference‖₂ over all parameters."""
    masked: float = 0.0
    """‖mask ⊙ (θ − reference)‖₂."""


@dataclass(frozen=True)
class Pull:
    strengths: Strengths
    reference: Tensor
    """A row for every client."""
    mask: Tensor | None = None
    """As many, True where the masked term counts."""

    def of(self, clients: Tensor) -> "Pull":
        """The same for some of the clients, by position."""
        mask = None if self.mask is None else self.mask[clients]
        return replace(self, reference=self.reference[clients], mask=mask)

    def alike(self, other: "Pull | None") -> bool:
        """Whether one pull can be made of both."""
        if other is None:
            return False
        return self.strengths == other.strengths and (self.mask is None) == (
            other.mask is None
        )


def together(pulls: list[Pull]) -> Pull:
    """Of pulls that are alike one for all their clients."""
    masks = [pull.mask for pull in pulls if pull.mask is not None]
    reference = torch.cat([pull.reference for pull in pulls])
    return Pull(pulls[0].strengths, reference, torch.cat(masks) if masks else None)


class PullAtWork:
    """References and masks where the rows of a stack are at work; they stay in place
    for captured steps.
    """

    def __init__(self, strengths: Strengths, workplace: Workplace) -> None:
        self._strengths, self._workplace = strengths, workplace
        self._spans = workplace.block_spans

    def reserve(self, clients: int, like: Tensor) -> None:
        self._reference = self._workplace.new(clients, like)
        self._mask = (
            self._workplace.new(clients, like) if self._strengths.masked else None
        )

    def load(self, pull: Pull) -> None:
        count = len(pull.reference)
        parameters, statistics = self._reference
        self._workplace.load(pull.reference, (parameters[:count], statistics[:count]))
        if self._mask is not None:
            assert pull.mask is not None, "a masked term needs a mask"
            parameters, statistics = self._mask
            self._workplace.load(pull.mask, (parameters[:count], statistics[:count]))

    def add(self, rows: Tensor, gradient: Tensor) -> None:
        """Adds the gradient of all terms, in place, to the gradient of the first
        clients' rows.

        Also where columns are frozen, whose gradient is not used. Two operations a
        layer: networks have many layers.
        """
        between = rows - self._reference[0][: len(rows)]
        if self._strengths.layers:
            norms = torch.stack(
                [
                    vector_norm(between[:, start:stop], dim=1)
                    for start, stop in self._spans
                ]
            )
            strengths = _over(self._strengths.layers, norms).unsqueeze(2)
            for (start, stop), strength in zip(self._spans, strengths, strict=True):
                gradient[:, start:stop].addcmul_(between[:, start:stop], strength)
        if self._strengths.whole:
            gradient.addcmul_(
                between,
                _over(self._strengths.whole, vector_norm(between, dim=1, keepdim=True)),
            )
        if self._mask is not None:
            between *= self._mask[0][: len(rows)]
            gradient.addcmul_(
                between,
                _over(
                    self._strengths.masked, vector_norm(between, dim=1, keepdim=True)
                ),
            )


def _over(strength: float, norm: Tensor) -> Tensor:
    """What lies between, by so much, is the gradient of strength × its norm."""
    return strength / (norm.square() + _LEAST).sqrt()
