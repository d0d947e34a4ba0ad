"""Standardised residuals: what clients' uploads differ in, which is a few per cent of
what they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_SMALLEST = 1e-12
"""Keeps columns in which all rows agree from a division by zero."""


@dataclass(frozen=True)
class RowScaling:
    """x = (row − mean) / scale, with a mean and a scale for every column.

    The mean is the bank's, column by column. The scale is the residual's standard
    deviation, one for each tensor of the client's network. Without the mean an
    autoencoder learns what all rows have in common, and every reconstruction is the
    global model.
    """

    mean: Tensor
    scale: Tensor

    @classmethod
    def of(cls, rows: Tensor, widths: Sequence[int]) -> "RowScaling":
        """Measure rows; `widths` are the numbers of columns of the tensors."""
        mean = rows.mean(0)
        columns = rows.split(list(widths), 1)
        means = mean.split(list(widths))
        scales = []
        for group, centre in zip(columns, means, strict=True):
            scale = (group - centre).square().mean().sqrt().clamp_min(_SMALLEST)
            scales.append(scale.expand(len(centre)))
        return cls(mean, torch.cat(scales))

    def __call__(self, rows: Tensor) -> Tensor:
        return (rows - self.mean) / self.scale

    def undo(self, standardised: Tensor) -> Tensor:
        """Return the rows of standardised residuals."""
        return standardised * self.scale + self.mean


@dataclass(frozen=True)
class LatentScaling:
    """Standardises latents: a mean for every dimension, but one scale for all, so that
    no direction is blown up.
    """

    mean: Tensor
    scale: Tensor

    @classmethod
    def of(cls, latents: Tensor) -> "LatentScaling":
        """Measure latents."""
        mean = latents.mean(0)
        scale = (latents - mean).square().mean().sqrt().clamp_min(_SMALLEST)
        return cls(mean, scale)

    def __call__(self, latents: Tensor) -> Tensor:
        return (latents - self.mean) / self.scale

    def undo(self, standardised: Tensor) -> Tensor:
        """Return the latents of standardised ones."""
        return standardised * self.scale + self.mean
