"""What a training of the server's model took, and how it went."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from hpcfed.results.server import LatentMap
from hpcfed.runtime.device import peak_memory
from hpcfed.server.options import ServerOptions

PEAK_TFLOPS = {
    "B200": (1100.0, 2250.0),
    "H200": (494.7, 989.4),
    "H100": (494.7, 989.4),
    "A100": (156.0, 311.9),
    "L40": (90.5, 181.1),
}
"""Dense matrix products in TF32 and in bfloat16, from the makers' data sheets."""


@dataclass(frozen=True)
class Inversion:
    """Rows that the server has generated from clients' newest uploads."""

    rows: Tensor
    """A row for each client; zeros for those that the server does not know."""
    known: np.ndarray
    """Which clients have an upload in the bank."""
    recognised: float
    """The share of all ranks' clients whose update is nearest to their own ones."""
    seconds: float
    """Seconds that the server took."""
    transfer: float
    """Seconds until the rows were here."""


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
