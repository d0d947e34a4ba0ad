"""What a training of the server's model took, and how it went."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from hpcfed.results.server import MOST_MAPPED, LatentMap
from hpcfed.runtime.device import peak_memory
from hpcfed.server.messages import KnownRows
from hpcfed.server.options import ServerOptions

PEAK_TFLOPS = {
    "B200": (1100.0, 2250.0),
    "H200": (494.7, 989.4),
    "H100": (494.7, 989.4),
    "A100": (156.0, 311.9),
    "L40": (90.5, 181.1),
}
"""Dense matrix products in TF32 and in bfloat16, from the makers' data sheets."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Inversion(KnownRows):
    """Rows that the server has generated from clients' newest uploads."""

    recognised: float
    """The share of all ranks' clients whose update is nearest to their own ones."""
    transfer: float = 0.0
    """Seconds until the rows were here, beyond those that the server took."""


@dataclass
class LearningReport:
    """Figures of one training of both networks; dictionaries are by network."""

    rows: int
    """Uploads in the bank."""
    losses: dict[str, np.ndarray] = field(default_factory=dict)
    """The loss of every step."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by phase, of which the networks are two."""
    samples: dict[str, int] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=dict)
    """FLOPs of all steps, forward and backward, over all server ranks."""
    peak_flops: float = float("nan")
    """FLOP/s that one server rank's device can reach."""
    peak_memory: list[float] = field(default_factory=list)
    """Bytes, of every server rank."""
    peak_here: int = 0
    """Bytes, of this rank."""
    ranks: int = 1
    recognised: float = float("nan")
    """The share of clients whose generated update is nearest to their own ones; NaN
    until rows are inverted.
    """
    latents: LatentMap | None = None

    def note_peak(self, device: torch.device) -> None:
        """Take down the most memory seen so far.

        It has to be asked for several times: DeepSpeed resets the device's count
        whenever ZeRO starts.
        """
        now = peak_memory(device)
        self.peak_here = max(self.peak_here, now)

    def utilisation(self, network: str) -> float:
        """Return the model's FLOPs as a share of what the devices could have done."""
        # NaN where the device's peak is not known.
        seconds = self.seconds[network]
        possible = seconds * self.ranks * self.peak_flops
        return self.flops[network] / possible

    def with_inversion(self, inversion: Inversion) -> "LearningReport":
        """Return this report with what an inversion after it has measured."""
        seconds = dict(self.seconds)
        # Added up: a method may invert more than once after a learning.
        seconds["invert"] = seconds.get("invert", 0.0) + inversion.seconds
        seconds["return"] = seconds.get("return", 0.0) + inversion.transfer
        return replace(self, recognised=inversion.recognised, seconds=seconds)


def peak_flops(device: torch.device, options: ServerOptions) -> float:
    """Return the FLOP/s of the device's data sheet; NaN where they are not known."""
    if device.type != "cuda":
        return float("nan")
    # Names are like "NVIDIA H100 80GB HBM3".
    name = torch.cuda.get_device_name(device)
    for known, (tf32, bf16) in PEAK_TFLOPS.items():
        if known in name:
            tflops = bf16 if options.server_precision == "bf16" else tf32
            return 1e12 * tflops
    return float("nan")


@torch.no_grad()
def latent_map(
    rows: Tensor, clients: np.ndarray, encode: Callable[[Tensor], Tensor]
) -> LatentMap:
    """Map what the model has made of the bank's uploads, which are the clients'."""
    chosen = mapped_uploads(len(rows))
    latents = encode(rows[torch.from_numpy(chosen).to(rows.device)])
    return principal_map(latents.double().cpu().numpy(), clients[chosen])


def mapped_uploads(count: int) -> np.ndarray:
    """Return which of `count` uploads are on the map: evenly chosen, all if few."""
    return np.linspace(0, count - 1, min(count, MOST_MAPPED)).round().astype(np.int64)


def principal_map(latents: np.ndarray, clients: np.ndarray) -> LatentMap:
    """Place latents on their two principal axes."""
    centred = latents - latents.mean(0)
    # The products of few latents with each other are a smaller matrix than those of
    # thousands of columns, and have the same principal axes.
    sizes, axes = np.linalg.eigh(centred @ centred.T)
    largest = [-1, -2] if len(sizes) > 1 else [-1, -1]
    variances = np.maximum(sizes, 0.0)
    places = axes[:, largest] * np.sqrt(variances[largest])
    # An axis may point either way: let its farthest upload be on the positive side.
    farthest = places[np.abs(places).argmax(0), [0, 1]]
    places = places * np.where(farthest < 0, -1.0, 1.0)
    shares = variances[largest] / max(float(variances.sum()), np.finfo(float).tiny)
    return LatentMap(clients, places, shares)
