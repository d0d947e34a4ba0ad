"""How large the server's networks are; imports no torch."""

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
