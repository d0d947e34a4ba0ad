"""DDPM in the latent space, and pFedGPA's two uses of it: inversion, and guidance of
new clients.

Times run from 1 to T, as in the papers; z_0 is a latent, z_T is noise. Functions
compute in the type of their arguments, so that tests can use float64. Equation numbers
are those of Lai et al. 2025.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hpcfed.server.guidance import Guidance

Epsilon = Callable[[Tensor, Tensor], Tensor]
"""ε(z, t) for latents [n, size] and times [n]."""
Noise = Callable[[], Tensor]
"""Returns fresh standard normal noise for all latents."""


@dataclass(frozen=True)
class Schedule:
    """β_t and ᾱ_t for t = 0 … T; at t = 0 there is no noise yet."""

    betas: Tensor
    alpha_bars: Tensor

    @classmethod
    def linear(cls, steps: int, device: torch.device | str = "cpu") -> "Schedule":
        """Return β_t that rises linearly from 1e-4 to 0.02, as for T = 1000."""
        usual = torch.linspace(1e-4, 0.02, steps, dtype=torch.float64)
        # The usual range is for a thousand steps; fewer steps must add the same total
        # noise.
        stretch = 1000 / steps
        betas = torch.zeros(steps + 1, dtype=torch.float64)
        betas[1:] = usual * stretch
        # With very few steps β would exceed 1, and √(1 − β) would not be a number.
        betas.clamp_(max=0.999)
        alphas = 1 - betas
        alpha_bars = alphas.cumprod(0)
        return cls(betas.to(device), alpha_bars.to(device))

    @property
    def steps(self) -> int:
        return len(self.betas) - 1

    def sigma(self, t: int) -> Tensor:
        """Return σ_t, where σ_t² = (1 − ᾱ_{t−1}) / (1 − ᾱ_t) β_t, so σ_1 = 0."""
        before = 1 - self.alpha_bars[t - 1]
        now = 1 - self.alpha_bars[t]
        variance = before / now * self.betas[t]
        return variance.sqrt()

    def noised(self, z0: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """Return z_t in one draw; each latent has its own time."""
        alpha_bars = self.alpha_bars[t].to(z0.dtype)
        alpha_bar = alpha_bars.unsqueeze(-1)
        signal = alpha_bar.sqrt() * z0
        return signal + (1 - alpha_bar).sqrt() * noise

    def mean(self, z: Tensor, t: int, epsilon: Tensor) -> Tensor:
        """Return μ(z_t, t), the mean of z_{t−1}, with 1/√α_t as in Eq. 16 (Eq. 6 has
        a misprint there).
        """
        beta = self.betas[t].to(z.dtype)
        alpha_bar = self.alpha_bars[t].to(z.dtype)
        weight = beta / (1 - alpha_bar).sqrt()
        denoised = z - weight * epsilon
        return denoised / (1 - beta).sqrt()


def diffuse(
    schedule: Schedule, z0: Tensor, depth: int, noise: Noise
) -> tuple[Tensor, list[Tensor]]:
    """Return z_depth, and the noise of each step 1 … depth, computed from the path as
    in Eq. 12.
    """
    z = z0
    noises = []
    for t in range(1, depth + 1):
        beta = schedule.betas[t].to(z0.dtype)
        shrunk = (1 - beta).sqrt() * z
        z = shrunk + beta.sqrt() * noise()
        # Eq. 12 computes the noise from the path instead of using the drawn noise.
        added = z - shrunk
        noises.append(added / beta.sqrt())
    return z, noises


def retrace(schedule: Schedule, z: Tensor, noises: list[Tensor]) -> Tensor:
    """Return z_0 by going back from z_depth along the same path (Eq. 14)."""
    for t in range(len(noises), 0, -1):
        beta = schedule.betas[t].to(z.dtype)
        shrunk = z - beta.sqrt() * noises[t - 1]
        z = shrunk / (1 - beta).sqrt()
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
    """Return new latents that keep what is specific to the old ones (Eqs. 11 to 16).

    `use` says which noise to add on the way back: the recorded noise with a minus sign,
    because it was added on the way forward; fresh noise; or none, which is DDIM's
    deterministic way. At full depth, as printed, z_T contains nothing of the client,
    and its identity is lost. A smaller depth keeps more of it, as far as the two
    networks have learnt to distinguish clients.
    """
    z, noises = diffuse(schedule, z0, depth, noise)
    for t in range(depth, 0, -1):
        predicted = epsilon(z, _times(z, t))
        if use == "none":
            z = _ddim(schedule, z, t, predicted)
            continue
        # Eq. 15's minus: the recorded noise is the forward one.
        added = -noises[t - 1] if use == "recorded" else noise()
        mean = schedule.mean(z, t, predicted)
        sigma = schedule.sigma(t).to(z.dtype)
        z = mean + sigma * added
    return z


def sample(schedule: Schedule, epsilon: Epsilon, noise: Noise) -> Tensor:
    """Generate latents from noise alone, without inversion (Eq. 6)."""
    z = noise()
    for t in range(schedule.steps, 0, -1):
        predicted = epsilon(z, _times(z, t))
        mean = schedule.mean(z, t, predicted)
        sigma = schedule.sigma(t).to(z.dtype)
        # σ_1 is zero: the last step adds nothing.
        z = mean + sigma * noise()
    return z


def guide(
    schedule: Schedule,
    epsilon: Epsilon,
    z: Tensor,
    progress: Tensor,
    how: Guidance,
    noise: Noise,
) -> Tensor:
    """Return latents after some reverse steps. Each step follows the client's progress
    in the latent space (Eq. 10, Algorithm 1).

    Our reading is ε̃ = ε(z, t) − (1 + ω)(E(θ_l) − E(θ̂_{l−1})). The sign as printed in
    line 11 would undo the client's progress; it is an option. Steps use only the means,
    unless line 12's σ_t z is asked for.
    """
    local = (1 + how.strength) * progress
    if how.sign == "printed":
        local = -local
    z = _entered(schedule, z, how, noise)
    last = max(0, how.start - how.steps)
    for t in range(how.start, last, -1):
        predicted = epsilon(z, _times(z, t))
        z = schedule.mean(z, t, predicted - local)
        if how.fresh_noise:
            z = z + schedule.sigma(t).to(z.dtype) * noise()
    if how.entry == "clean":
        return z
    # Steps that end before time 0 leave the scale of their last time.
    return z / schedule.alpha_bars[last].to(z.dtype).sqrt()


def _entered(schedule: Schedule, z: Tensor, how: Guidance, noise: Noise) -> Tensor:
    """Return latents as they enter the time from which reverse steps begin.

    The paper does not say how. A clean latent is larger than the denoiser expects at
    that time: it takes part of it for noise.
    """
    if how.entry == "clean":
        return z
    added = noise() if how.entry == "noised" else torch.zeros_like(z)
    times = _times(z, how.start)
    return schedule.noised(z, times, added)


def _times(z: Tensor, t: int) -> Tensor:
    return torch.full((len(z),), t, device=z.device)


def _ddim(schedule: Schedule, z: Tensor, t: int, epsilon: Tensor) -> Tensor:
    """Return z_{t−1} without noise: the clean latent that ε implies, noised again."""
    now = schedule.alpha_bars[t].to(z.dtype)
    before = schedule.alpha_bars[t - 1].to(z.dtype)
    noise = (1 - now).sqrt() * epsilon
    clean = (z - noise) / now.sqrt()
    noise = (1 - before).sqrt() * epsilon
    return before.sqrt() * clean + noise
