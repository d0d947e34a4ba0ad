"""How the learning rate changes, from round to round or from step to step."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

ScheduleKind = Literal["constant", "step", "cosine", "warmup", "warmup-cosine"]


class RateSchedule(NamedTuple):
    """Factors on the learning rate, over rounds or over a client's local steps."""

    kind: ScheduleKind
    drop_every: int | None = None
    """Rounds or steps between two drops of "step"; None: a third of all."""
    drop: float = 0.1
    """The factor of each drop."""
    lowest: float = 0.0
    """The share of the rate that the cosine falls to."""
    warmup: int | None = None
    """Rounds or steps in which the rate rises to its full value; None: a tenth of
    all.
    """

    def factors(self, at: Tensor, total: Tensor) -> Tensor:
        """Return the factor at each position `at`, counted from 0, of `total`.

        Positions beyond the last have the last one's factor.
        """
        at = torch.minimum(at, total - 1)
        # Shares below are in float64: torch would divide whole numbers in float32.
        if self.kind == "constant":
            return torch.ones_like(at, dtype=torch.float64)
        if self.kind == "step":
            every = -(-total // 3) if self.drop_every is None else self.drop_every
            return self.drop ** (at // every).double()
        if self.kind == "cosine":
            return self._cosine(at.double() / total)
        warmup = -(-total // 10)
        if self.warmup is not None:
            warmup = torch.full_like(total, self.warmup)
        # Not from 0, where the first round or step would change nothing.
        rising = (at + 1).double() / warmup
        if self.kind == "warmup":
            return rising.clamp(max=1)
        # At least 1: a client may have fewer steps than the warm-up.
        left = (total - warmup).clamp(min=1)
        falling = self._cosine((at - warmup).double() / left)
        return torch.where(at < warmup, rising, falling)

    def _cosine(self, share: Tensor) -> Tensor:
        """Return the factor after this share of the total, like CosineAnnealingLR."""
        height = (1 + torch.cos(torch.pi * share)) / 2
        return self.lowest + (1 - self.lowest) * height

    def factor(self, at: int, total: int) -> float:
        """Return the factor at position `at`, counted from 0, of `total`."""
        return float(self.factors(torch.tensor(at), torch.tensor(total)))
