"""How a learning rate changes over rounds or steps. Imports torch only for tensors."""

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:  # the command line loads no torch
    import numpy as np
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
    """Rounds or steps in which the rate rises to its full value; None: a tenth."""

    def factors(self, at: "Tensor", total: "Tensor") -> "Tensor":
        """Return the factor at each position `at`, counted from 0, of `total`.

        Positions beyond the last have the last one's factor.
        """
        import torch

        found: Tensor = self._factors(torch, at, total)
        return found

    def factor(self, at: int, total: int) -> float:
        """Return the factor at position `at`, counted from 0, of `total`."""
        import torch

        return float(self.factors(torch.tensor(at), torch.tensor(total)))

    def acts(self, total: int) -> bool:
        """Tell whether any of `total` factors differs from 1."""
        # A rate rises, falls, or rises first and falls then: its ends tell.
        return bool((self._among([0, total - 1], total) != 1).any())

    def least(self, total: int) -> int:
        """Return the least number of rounds from `total` on in which any factor differs
        from 1; `total` if there is none, as with drops by a factor of 1.
        """
        # Ten more: a warm-up is a tenth of all rounds, and must take two.
        more = range(total, total + 11)
        return next(filter(self.acts, more), total)

    def begins_alike(self, total: int, other: int) -> bool:
        """Tell whether the factors of a run of `total` are also those with which one of
        `other` begins.
        """
        at = range(total)
        return bool((self._among(at, total) == self._among(at, other)).all())

    def _among(self, at: "range | list[int]", total: int) -> "np.ndarray":
        import numpy as np

        # Without a warm-up, what would rise is divided by 0, and not used.
        with np.errstate(divide="ignore"):
            found: np.ndarray = self._factors(np, np.array(at), np.full(len(at), total))
        return found

    def _factors(self, xp: Any, at: Any, total: Any) -> Any:
        """Return the factors as arrays of `xp`, which is torch or numpy."""
        # In float64: torch would divide whole numbers in float32.
        total = xp.asarray(total, dtype=xp.float64)
        at = xp.minimum(xp.asarray(at, dtype=xp.float64), total - 1)
        if self.kind == "constant":
            return xp.ones_like(at)
        if self.kind == "step":
            # Never 0: options read 0 as None, and a third is rounded up.
            every = -(-total // 3) if self.drop_every is None else self.drop_every
            return self.drop ** (at // every)
        if self.kind == "cosine":
            return self._cosine(xp, at / total)
        warmup = -(-total // 10)
        if self.warmup is not None:
            warmup = xp.full_like(total, self.warmup)
        # Not from 0, where the first round or step would change nothing.
        rising = (at + 1) / warmup
        if self.kind == "warmup":
            return xp.clip(rising, None, 1)
        # At least 1: a client may have fewer steps than the warm-up.
        left = xp.clip(total - warmup, 1, None)
        falling = self._cosine(xp, (at - warmup) / left)
        return xp.where(at < warmup, rising, falling)

    def _cosine(self, xp: Any, share: Any) -> Any:
        """Return the factor after this share of the total, like CosineAnnealingLR."""
        height = (1 + xp.cos(xp.pi * share)) / 2
        return self.lowest + (1 - self.lowest) * height
