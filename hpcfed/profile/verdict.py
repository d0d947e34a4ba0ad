"""What holds a part of the run back, in words, and what to change next."""

from dataclasses import dataclass
from math import isnan
from typing import Any

FED = 0.6
"""Below this share of busy time a device waits for launches."""
NEAR = 0.3
"""From this share of a ceiling on, the ceiling is what limits; below, pieces are too
small to reach any.
"""


@dataclass(frozen=True)
class Part:
    """A part of the run beside the device's ceilings."""

    name: str
    seconds: float
    """Of the whole run."""
    warm: float
    """The same at the pace of the rounds or steps that come last: without choosing and
    capturing kernels.
    """
    busy: float
    """NaN where no profiler has looked."""
    compute: float
    """Achieved arithmetic by the measured ceiling (MFU), when warm."""
    bandwidth: float
    """Bytes that must at least be moved, per second, by the measured ceiling, when
    warm.
    """

    @property
    def bound(self) -> str:
        if not isnan(self.busy) and self.busy < FED:
            return "launch-bound"
        known = {"compute-bound": self.compute, "bandwidth-bound": self.bandwidth}
        known = {name: share for name, share in known.items() if not isnan(share)}
        if not known:
            return "not known"
        best = max(known, key=lambda name: known[name])
        return best if known[best] >= NEAR else "bound by small pieces"


def words(part: Part, *, cuda: bool) -> str:
    """One sentence for a person."""
    at_work = "the GPU is" if cuda else "torch's operators are"
    reasons = {
        "launch-bound": f"{at_work} at work {part.busy:.0%} of the time: the rest is launching, Python and waiting",
        "compute-bound": f"{part.compute:.0%} of a large matrix product's speed: arithmetic is what takes the time",
        "bandwidth-bound": f"{part.bandwidth:.0%} of a large copy's speed: moving bytes is what takes the time",
        "bound by small pieces": f"mostly at work, but at {_share(part.compute)} of the arithmetic and at least "
        f"{_share(part.bandwidth)} of the bandwidth: kernels are too small to fill the device",
        "not known": "neither its arithmetic nor a profile of it is known",
    }
    return f"{part.name} is {part.bound}: {reasons[part.bound]}" if part.bound != "not known" else (
        f"{part.name}: {reasons['not known']}"
    )  # fmt: skip


def _share(value: float) -> str:
    return "an unknown share" if isnan(value) else f"{value:.0%}"


def advice(
    part: Part, options: dict[str, Any], *, cuda: bool, server: bool
) -> list[str]:
    """Options that may help, most promising first."""
    tips = []
    if server:
        if part.bound == "launch-bound" and cuda and not _captured(options):
            tips.append(
                "let its steps be captured as graphs: --zero-stage below 3, no "
                "accumulation, no checkpointing"
            )
        if part.bound in ("launch-bound", "bound by small pieces"):
            tips.append(
                "larger batches (--server-batch, --denoiser-batch) with fewer steps; "
                "watch the reconstruction"
            )
        if (
            part.bound in ("compute-bound", "bandwidth-bound")
            and options.get("server_precision") != "bf16"
            and cuda
        ):
            tips.append("--server-precision bf16")
        if part.bound == "compute-bound":
            tips.append("more --server-ranks, which share each batch")
        if options.get("server_offload", "none") != "none":
            tips.append("--server-offload none, if the model fits")
    else:
        if options.get("engine") == "loop":
            tips.append("--engine batched advances all clients of a rank together")
        if part.bound in ("launch-bound", "bound by small pieces"):
            tips.append(
                "more clients on a rank, stacked --seeds, or a larger --batch-size "
                "fill the device better"
            )
        if part.bound in ("compute-bound", "bandwidth-bound"):
            tips.append("more ranks: the clients are shared out")
        if (
            part.bound == "compute-bound"
            and cuda
            and options.get("precision") in ("fp32", "fp64")
        ):
            tips.append("--precision tf32")
    return tips


def _captured(options: dict[str, Any]) -> bool:
    plain = not options.get("server_micro_batch") and not options.get(
        "server_checkpointing"
    )
    return plain and int(options.get("zero_stage", 0)) < 3
