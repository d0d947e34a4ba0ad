"""DDPM in the latent space, and the paper's two ways to use it: inversion, and guidance
of new clients.

Times run from 1 to T, as in the papers; z_0 is a latent, z_T is noise. Arithmetic is
that of its arguments, so tests can ask for float64.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Epsilon = Callable[[Tensor, Tensor], Tensor]
"""ε(z, t) for latents [n, size] and times [n]."""
Noise = Callable[[], Tensor]
"""Fresh standard normal noise for all latents."""


@dataclass(frozen=True)
class Schedule:
    """β_t linear from 1e-4 to 0.02; entries 0 stand for t = 0, where nothing has been
    added yet.
    """

    betas: Tensor
    alpha_bars: Tensor

    @classmethod
    def linear(cls, steps: int, device: torch.device | str = "cpu") -> "Schedule":
        betas = torch.zeros(steps + 1, dtype=torch.float64)
        # The usual ends belong to a thousand steps; fewer steps must add the same noise
        # in all.
        betas[1:] = torch.linspace(1e-4, 0.02, steps, dtype=torch.float64) * (
            1000 / steps
        )
        betas.clamp_(max=0.999)
        return cls(betas.to(device), (1 - betas).cumprod(0).to(device))

    @property
    def steps(self) -> int:
        return len(self.betas) - 1

    def sigma(self, t: int) -> Tensor:
        """σ_t² = (1 − ᾱ_{t−1}) / (1 − ᾱ_t) β_t, so σ_1 = 0."""
        return (
            (1 - self.alpha_bars[t - 1]) / (1 - self.alpha_bars[t]) * self.betas[t]
        ).sqrt()

    def noised(self, z0: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """z_t drawn at once, for times of their own."""
        kept = self.alpha_bars[t].to(z0.dtype).unsqueeze(-1)
        return kept.sqrt() * z0 + (1 - kept).sqrt() * noise

    def mean(self, z: Tensor, t: int, epsilon: Tensor) -> Tensor:
        """μ(z_t, t), the mean of z_{t−1}, with 1/√α_t as in Eq. 16."""
        beta, bar = self.betas[t].to(z.dtype), self.alpha_bars[t].to(z.dtype)
        return (z - beta / (1 - bar).sqrt() * epsilon) / (1 - beta).sqrt()


def diffuse(
    schedule: Schedule, z0: Tensor, depth: int, noise: Noise
) -> tuple[Tensor, list[Tensor]]:
    """z_depth, and the noises of the steps 1 … depth, computed from the path as in Eq.
    12.
    """
    z, noises = z0, []
    for t in range(1, depth + 1):
        beta = schedule.betas[t].to(z0.dtype)
        following = (1 - beta).sqrt() * z + beta.sqrt() * noise()
        noises.append((following - (1 - beta).sqrt() * z) / beta.sqrt())
        z = following
    return z, noises


def retrace(schedule: Schedule, z: Tensor, noises: list[Tensor]) -> Tensor:
    """Back from z_depth to z_0 along the very path (Eq. 14)."""
    for t in range(len(noises), 0, -1):
        beta = schedule.betas[t].to(z.dtype)
        z = (z - beta.sqrt() * noises[t - 1]) / (1 - beta).sqrt()
    return z


def invert(
    schedule: Schedule,
    epsilon: Epsilon,
    z0: Tensor,
    *,
    depth: int,
    noise: Noise,
    use: Literal["recorded", "fresh", "none"] = "recorded",
) -> Tensor:
    """New latents that keep what is particular about the old (Eqs. 11 to 16).

    The noise on the way back is the recorded one with a minus, since it was added on
    the way there; or fresh noise; or none, which is DDIM's deterministic way. At the
    full depth, as printed, z_T holds nothing of the client, and its identity is lost;
    the shallower, the more of it stays, as far as the two networks have learnt to tell
    clients apart.
    """
    z, noises = diffuse(schedule, z0, depth, noise)
    for t in range(depth, 0, -1):
        predicted = epsilon(z, _times(z, t))
        if use == "none":
            z = _ddim(schedule, z, t, predicted)
        else:
            added = -noises[t - 1] if use == "recorded" else noise()
            z = schedule.mean(z, t, predicted) + schedule.sigma(t).to(z.dtype) * added
    return z


def sample(schedule: Schedule, epsilon: Epsilon, noise: Noise) -> Tensor:
    """Latents out of noise alone: generation without inversion (Eq. 6)."""
    z = noise()
    for t in range(schedule.steps, 0, -1):
        z = (
            schedule.mean(z, t, epsilon(z, _times(z, t)))
            + schedule.sigma(t).to(z.dtype) * noise()
        )
    return z


def guide(
    schedule: Schedule,
    epsilon: Epsilon,
    z: Tensor,
    progress: Tensor,
    *,
    strength: float,
    start: int,
    steps: int,
) -> Tensor:
    """Some reverse steps from time `start`, of which each follows the client's own
    progress in the latent space.

    ε̃ = ε(z, t) − (1 + ω)(E(θ_l) − E(θ̂_{l−1})): read so because the printed sign would
    undo what the client has learnt. The steps are the means alone, without fresh noise.
    """
    for t in range(start, max(0, start - steps), -1):
        z = schedule.mean(z, t, epsilon(z, _times(z, t)) - (1 + strength) * progress)
    return z


def chunks(count: int, most: int) -> Iterator[slice]:
    """Few equal parts of at most so many."""
    parts = -(-count // most)
    for i in range(parts):
        yield slice(i * count // parts, (i + 1) * count // parts)


def _times(z: Tensor, t: int) -> Tensor:
    return torch.full((len(z),), t, device=z.device)


def _ddim(schedule: Schedule, z: Tensor, t: int, epsilon: Tensor) -> Tensor:
    now, before = (schedule.alpha_bars[i].to(z.dtype) for i in (t, t - 1))
    clean = (z - (1 - now).sqrt() * epsilon) / now.sqrt()
    return before.sqrt() * clean + (1 - before).sqrt() * epsilon
