"""Standardised residuals: the differences between clients' uploads, which are only a
few per cent of the uploads themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST = 1e-12
"""Avoids a division by zero if all rows agree."""


@dataclass(frozen=True)
class RowScaling:
    """x = (row − mean) / scale, with a mean and a scale for every column.

    The mean is that of the bank, column by column. The scale is the residual's standard
    deviation, one for each tensor of the client's network. Without subtracting the
    mean, an autoencoder learns only what all rows have in common, and every
    reconstruction is the global model.
    """

    mean: Tensor
    scale: Tensor

    @classmethod
    def of(cls, rows: Tensor, widths: Sequence[int]) -> "RowScaling":
        """Compute the scaling of rows; `widths` are the tensors' numbers of columns."""
        mean = rows.mean(0)
        scales = []
        start = 0
        for width in widths:
            columns = slice(start, start + width)
            residual = rows[:, columns] - mean[columns]
            # One scale per tensor: weights and biases differ by orders of magnitude.
            scale = _deviation(residual)
            scales.append(scale.expand(width))
            start += width
        return cls(mean, torch.cat(scales))

    def __call__(self, rows: Tensor) -> Tensor:
        residual = rows - self.mean
        return residual / self.scale

    def undo(self, standardised: Tensor) -> Tensor:
        """Return the rows from standardised residuals."""
        residual = standardised * self.scale
        return residual + self.mean


@dataclass(frozen=True)
class LatentScaling:
    """Standardises latents. Each dimension has its own mean, but all share one scale,
    so that no direction is blown up.
    """

    mean: Tensor
    scale: Tensor

    @classmethod
    def of(cls, latents: Tensor) -> "LatentScaling":
        """Compute the scaling of latents."""
        mean = latents.mean(0)
        scale = _deviation(latents - mean)
        return cls(mean, scale)

    def __call__(self, latents: Tensor) -> Tensor:
        centred = latents - self.mean
        return centred / self.scale

    def undo(self, standardised: Tensor) -> Tensor:
        """Return the latents from standardised ones."""
        centred = standardised * self.scale
        return centred + self.mean


def _deviation(residual: Tensor) -> Tensor:
    """Return the standard deviation of numbers whose mean is zero."""
    # Not torch.std, which divides by n − 1.
    variance = residual.square().mean()
    return variance.sqrt().clamp_min(SMALLEST)
