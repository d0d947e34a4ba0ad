"""How large the server's networks and the parts of their steps are; imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """How large the server's networks are."""

    width: int
    """Channels of the first convolution; later ones have up to 4 times more, the
    denoiser's 2^(depth−2), at least 4.
    """
    latent: int
    """Numbers of a latent."""
    depth: int
    """Convolutions of the encoder, each of which halves the length."""
    lr: float = 1e-3
    """AdamW's learning rate."""


SIZES = {
    "tiny": Size(4, 32, 1, 3e-3),
    "small": Size(4, 32, 2, 3e-3),
    "paper": Size(64, 256, 5),
    "large": Size(512, 1024, 5),
}
"""`tiny`: what a CPU trains in half a minute; `paper`: 40 million parameters of the
autoencoder for the CIFAR-10 network's last two layers; `large`: a billion.
"""


@dataclass(frozen=True)
class Batching:
    """How a step's samples are divided."""

    micro: int
    """Samples of a micro-batch: what a rank takes at once."""
    accumulation: int
    """Micro-batches that a rank takes one after the other in each step."""
    ranks: int
    shared: bool = False
    """Whether ranks draw and normalise the whole batch together, each with its slice;
    else every micro-batch is drawn and normalised by itself.
    """

    @property
    def batch(self) -> int:
        """Samples of a step, over all ranks."""
        return self.micro * self.accumulation * self.ranks

    @property
    def drawn(self) -> int:
        """Samples that are drawn together."""
        return self.batch if self.shared else self.micro

    def slice_of(self, number: int) -> tuple[int, slice]:
        """Return the draw that a micro-batch of a step belongs to, and its slice of it."""
        if not self.shared:
            return number, slice(None)
        start = number * self.micro
        return 0, slice(start, start + self.micro)
