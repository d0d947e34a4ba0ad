"""Standardised residuals: what clients' uploads differ in, which is a few per cent of
what they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_SMALLEST = 1e-12


@dataclass(frozen=True)
class Standard:
    """x = (row − mean) / scale, with a mean and a scale for every column.

    The mean is the bank's, column by column; the scale is the residual's standard
    deviation, one for each tensor of the client's network. Without the mean an
    autoencoder learns what all rows have in common, and every reconstruction is the
    global model.
    """

    mean: Tensor
    scale: Tensor

    @classmethod
    def of(cls, rows: Tensor, widths: Sequence[int]) -> "Standard":
        """`widths` are the numbers of columns of the tensors, in order."""
        mean = rows.mean(0)
        scales = [
            (part - middle).square().mean().sqrt().clamp_min(_SMALLEST).expand(width)
            for part, middle, width in zip(
                rows.split(list(widths), 1),
                mean.split(list(widths)),
                widths,
                strict=True,
            )
        ]
        return cls(mean, torch.cat(scales))

    def __call__(self, rows: Tensor) -> Tensor:
        return (rows - self.mean) / self.scale

    def undo(self, standardised: Tensor) -> Tensor:
        return standardised * self.scale + self.mean


@dataclass(frozen=True)
class LatentStandard:
    """The same for latents: a mean for every dimension, one scale for all, so that no
    direction is blown up.
    """

    mean: Tensor
    scale: Tensor

    @classmethod
    def of(cls, latents: Tensor) -> "LatentStandard":
        mean = latents.mean(0)
        return cls(mean, (latents - mean).square().mean().sqrt().clamp_min(_SMALLEST))

    def __call__(self, latents: Tensor) -> Tensor:
        return (latents - self.mean) / self.scale

    def undo(self, standardised: Tensor) -> Tensor:
        return standardised * self.scale + self.mean
