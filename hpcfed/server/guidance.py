"""How the server guides new clients (Lai et al. 2025, Eq. 10 and Algorithm 1, lines 7
to 15): readings of what the paper leaves open; imports no torch.
"""

from dataclasses import dataclass
from typing import Literal

Sign = Literal["progress", "printed"]
"""The sign of a client's progress: along it, or as the paper prints it."""
LatentEntry = Literal["clean", "scaled", "noised"]
"""How a latent enters the time from which reverse steps begin: as it is, scaled as noise
would scale it, or noised.
"""


@dataclass(frozen=True, kw_only=True)
class Guidance:
    """How rows are guided after a local update."""

    strength: float
    """ω: what a client's own progress counts for beyond once; at −1 it does not count."""
    start: int
    """The diffusion time from which reverse steps begin."""
    steps: int
    """The number of reverse steps."""
    sign: Sign = "progress"
    entry: LatentEntry = "clean"
    fresh_noise: bool = False
    """Whether to add fresh noise in each step."""
    moved: bool = False
    """Whether a row is moved as far as guidance moves its reconstruction. Otherwise it is
    replaced by what is decoded.
    """
    stream: str = "guidance"
    """The name of the random stream."""
