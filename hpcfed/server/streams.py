"""The server's random numbers. They depend on seed, purpose and number of learnings,
never on the rank.
"""

import torch
from torch import Tensor

from hpcfed.runtime import randomness
from hpcfed.server.diffusion import Noise
from hpcfed.server.losses import Draws


class Streams:
    """Random streams of one model, by purpose."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device
        self.learnings = 0
        """How often the model has learnt, so that the next learning draws other numbers."""

    def seed(self, purpose: str) -> int:
        """Return a seed for this purpose."""
        key = f"server {purpose}"
        numbers = randomness.generator(self._seed, key, self.learnings)
        return int(numbers.integers(2**62))

    def draws(self, purpose: str, device: torch.device | None = None) -> Draws:
        """Return a generator that is set to (step, number of the draw); it draws on the
        model's device unless another is given.
        """
        base = self.seed(purpose)
        random = torch.Generator(device or self._device)

        def draw(step: int, number: int) -> torch.Generator:
            # A step has fewer than 2^16 draws, so no two draws share a seed.
            position = base + (step << 16) + number
            return random.manual_seed(position % 2**63)

        return draw

    def noise(self, purpose: str, like: Tensor) -> Noise:
        """Return a function that draws standard normal noise of this shape."""
        random = torch.Generator(like.device)
        random.manual_seed(self.seed(purpose))
        return lambda: torch.randn(
            like.shape, device=like.device, dtype=like.dtype, generator=random
        )
