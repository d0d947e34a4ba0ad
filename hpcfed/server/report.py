"""The cost and the results of training the server's model."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from hpcfed.results.server import MOST_MAPPED, LatentMap
from hpcfed.runtime import accelerator
from hpcfed.runtime.device import peak_memory
from hpcfed.server.bank import BankedRows
from hpcfed.server.messages import KnownRows
from hpcfed.server.options import ServerOptions

PEAK_TFLOPS = {
    "B200": (1100.0, 2250.0),
    "H200": (494.7, 989.4),
    "H100": (494.7, 989.4),
    "A100": (156.0, 311.9),
    "L40": (90.5, 181.1),
}
"""Peak of dense matrix products in TF32 and in bfloat16, from the makers' data sheets.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Inversion(KnownRows):
    """Rows that the server has generated from clients' newest uploads."""

    recognised: float
    """The share of clients, on all ranks, whose generated update has their own
    direction.
    """
    recognised_uploads: float
    """The share of clients whose newest upload has their own direction."""
    transfer: float = 0.0
    """Seconds until the rows arrived, beyond those that the server needed."""


@dataclass
class LearningReport:
    """Figures of one training of both networks; dictionaries are keyed by network."""

    rows: int
    """Uploads in the bank."""
    losses: dict[str, np.ndarray] = field(default_factory=dict)
    """The loss of every step."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by phase; each network is a phase."""
    samples: dict[str, int] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=dict)
    """FLOPs of all steps, forward and backward, over all server ranks."""
    peak_flops: float = float("nan")
    """Peak FLOP/s of one server rank's device."""
    peak_memory: list[float] = field(default_factory=list)
    """Peak memory of every server rank, in bytes."""
    peak_here: int = 0
    """Peak memory of this rank so far, in bytes."""
    promised: dict[str, dict[str, float]] = field(default_factory=dict)
    """Bytes of a server rank by part, as the ZeRO stage promises them."""
    training_memory: dict[str, float] = field(default_factory=dict)
    """The most bytes that training took on a server rank, beside what it held before: its
    network, the engine's start and all steps. NaN if not on a GPU.
    """
    ranks: int = 1
    recognised: float = float("nan")
    """The share of clients whose generated update has their own direction; NaN until rows
    are inverted.
    """
    recognised_uploads: float = float("nan")
    """The share of clients whose newest upload has their own direction."""
    latents: LatentMap | None = None
    bank_bytes: list[float] = field(default_factory=list)
    """Bytes of the bank on every server rank."""
    earlier: float = 0.0
    """Seconds of its steps that a run before made, which was stopped."""
    after: int | None = None
    """The round, from 0, after which it began; None: the round that it is recorded
    with, whose clients have waited for it.
    """

    def note_peak(self, device: torch.device) -> None:
        """Record the peak memory so far.

        Call it before a peak is reset.
        """
        now = peak_memory(device)
        self.peak_here = max(self.peak_here, now)

    def utilisation(self, network: str) -> float:
        """Return the model's FLOPs as a share of what the devices could have done."""
        # NaN if the device's peak is unknown.
        seconds = self.seconds[network]
        possible = seconds * self.ranks * self.peak_flops
        return self.flops[network] / possible

    def with_inversion(self, inversion: Inversion) -> "LearningReport":
        """Return this report with the measurements of an inversion that followed."""
        seconds = dict(self.seconds)
        # A sum: a method may invert more than once after a learning.
        seconds["invert"] = seconds.get("invert", 0.0) + inversion.seconds
        seconds["return"] = seconds.get("return", 0.0) + inversion.transfer
        return replace(
            self,
            recognised=inversion.recognised,
            recognised_uploads=inversion.recognised_uploads,
            seconds=seconds,
        )


def peak_flops(device: torch.device, options: ServerOptions) -> float:
    """Return the FLOP/s of the device's data sheet; NaN if unknown."""
    if not accelerator.is_gpu(device):
        return float("nan")
    # Names are like "NVIDIA H100 80GB HBM3".
    name = accelerator.properties(device).name
    for known, (tf32, bf16) in PEAK_TFLOPS.items():
        if known in name:
            tflops = bf16 if options.server_precision == "bf16" else tf32
            return 1e12 * tflops
    return float("nan")


@torch.no_grad()
def latent_map(
    bank: BankedRows, latents_at: Callable[[BankedRows, np.ndarray], Tensor]
) -> LatentMap:
    """Map the latents of the bank's uploads."""
    chosen = mapped_uploads(len(bank))
    latents = latents_at(bank, chosen)
    return principal_map(latents.double().cpu().numpy(), bank.uploaders[chosen])


def mapped_uploads(count: int) -> np.ndarray:
    """Return which of `count` uploads to map: evenly spaced, or all if they are few."""
    return np.linspace(0, count - 1, min(count, MOST_MAPPED)).round().astype(np.int64)


def principal_map(latents: np.ndarray, clients: np.ndarray) -> LatentMap:
    """Place latents on their two principal axes."""
    centred = latents - latents.mean(0)
    # The Gram matrix of few latents is smaller than the covariance of thousands of
    # columns, and gives the same coordinates.
    sizes, axes = np.linalg.eigh(centred @ centred.T)
    largest = [-1, -2] if len(sizes) > 1 else [-1, -1]
    variances = np.maximum(sizes, 0.0)
    places = axes[:, largest] * np.sqrt(variances[largest])
    # The sign of an axis is arbitrary: put its farthest upload on the positive side.
    farthest = places[np.abs(places).argmax(0), [0, 1]]
    places = places * np.where(farthest < 0, -1.0, 1.0)
    shares = variances[largest] / max(float(variances.sum()), np.finfo(float).tiny)
    return LatentMap(clients, places, shares)
