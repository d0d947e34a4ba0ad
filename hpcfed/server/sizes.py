"""Sizes of the server's networks and of the parts of their steps; imports no torch."""

from dataclasses import dataclass

from hpcfed.errors import UserError


@dataclass(frozen=True)
class Size:
    """The size of the server's networks."""

    width: int
    """Channels of the first convolution. Later ones have up to 4 times as many, in the
    denoiser up to 2^(its depth − 2) times, at least 4.
    """
    latent: int
    """The length of a latent."""
    depth: int
    """Convolutions of the encoder, each of which halves the length."""
    lr: float = 1e-3
    """AdamW's learning rate."""
    denoiser_depth: int | None = None
    """The depth of p-diff's denoiser; None: as the encoder's."""


SIZES = {
    "tiny": Size(4, 32, 1, 3e-3),
    "small": Size(4, 32, 2, 3e-3),
    "paper": Size(64, 256, 5),
    "large": Size(512, 1024, 5),
}
"""`tiny`: a CPU trains it in half a minute. `paper`: the autoencoder has 40 million
parameters for the last two layers of the CIFAR-10 network. `large`: a billion.
"""
SPAN_SIZES = {
    "tiny": Size(256, 0, 2, 1e-3),
    "small": Size(512, 0, 2, 1e-3),
    "paper": Size(1024, 0, 4, 5e-4),
    "large": Size(8192, 0, 5, 1e-4),
}
"""Sizes of the denoiser of coordinates: the width of its stages, and their number. There
are as many coordinates as the bank's rows span.
"""
TOKEN_SIZES = {
    "tiny": Size(64, 64, 2, 2e-3),
    "small": Size(512, 512, 6, 3e-4),
    "paper": Size(1024, 1024, 12, 2e-4),
    "large": Size(2048, 2048, 26, 1e-4),
}
"""Sizes of the denoiser of tokens: its width, the numbers of a token, and its blocks: 20
million, 160 million and 1.3 billion parameters from `small` on. A token is not longer
than the width: otherwise its noise could not pass through.
"""
MODEL_SIZES = {"p-diff": SIZES, "span": SPAN_SIZES, "tokens": TOKEN_SIZES}


@dataclass(frozen=True)
class Batching:
    """How a step's samples are divided."""

    micro: int
    """Samples of a micro-batch, which a rank computes at once."""
    accumulation: int
    """Micro-batches that a rank computes one after the other in each step."""
    ranks: int
    shared: bool = False
    """Whether ranks draw and normalise the whole batch together, and each computes its
    slice. Otherwise every micro-batch is drawn and normalised by itself.
    """

    @classmethod
    def of(
        cls, batch: int, ranks: int, *, micro: int | None, flag: str, least: int
    ) -> "Batching":
        """Divide a batch, which `flag` has set, among ranks; refuse what is not even, and
        fewer than `least` samples to normalise over.

        Without `micro` any number of ranks learns the same, because ranks share the
        statistics of one batch. With it each micro-batch is drawn and normalised by
        itself.
        """
        if batch % ranks:
            raise UserError(
                f"{flag} {batch} cannot be shared by {ranks} server ranks; "
                f"use a multiple of {ranks}"
            )
        share = batch // ranks
        shared = ranks > 1 and not micro
        micro = micro or share
        if share % micro:
            raise UserError(
                f"--server-micro-batch {micro} does not divide the {share} samples of a "
                f"server rank ({flag} {batch} on {ranks})"
            )
        normalised_together = batch if shared else micro
        if normalised_together < least:
            raise UserError(
                f"{flag} {batch} leaves a micro-batch of {micro}; "
                "batch norm needs two samples"
            )
        return cls(micro, share // micro, ranks, shared)

    @property
    def batch(self) -> int:
        """Samples of a step, over all ranks."""
        return self.micro * self.accumulation * self.ranks

    @property
    def drawn(self) -> int:
        """Samples that are drawn together."""
        return self.batch if self.shared else self.micro

    def slice_of(self, number: int) -> tuple[int, slice]:
        """Return the draw that a step's micro-batch belongs to, and its slice of it."""
        if not self.shared:
            return number, slice(None)
        start = number * self.micro
        return 0, slice(start, start + self.micro)
