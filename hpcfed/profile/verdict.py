"""What holds a workload back, in words, and what to change next."""

from dataclasses import dataclass
from math import isnan
from typing import Any

FED = 0.6
"""Below this share of busy time a device waits for launches."""
NEAR = 0.3
"""From this share of a ceiling on, the ceiling is what limits; below, kernels are too
small to reach any.
"""


@dataclass(frozen=True)
class Workload:
    """The clients' training, or one of the server's networks, beside the device's
    ceilings.
    """

    name: str
    seconds: float
    """Seconds of the whole run."""
    warm: float
    """Seconds at the pace of the last rounds or steps: without choosing and capturing
    kernels.
    """
    busy: float
    """The share of time at work; NaN where no profiler has looked."""
    compute: float
    """Achieved arithmetic by the measured ceiling (MFU), when warm."""
    bandwidth: float
    """Bytes that must at least be moved, per second, by the measured ceiling, when
    warm.
    """

    @property
    def bound(self) -> str:
        """Name what limits the workload."""
        # First of all: a device that waits is near no ceiling.
        if not isnan(self.busy) and self.busy < FED:
            return "launch-bound"
        # A ceiling that is not known cannot be the one that limits.
        shares = {}
        if not isnan(self.compute):
            shares["compute-bound"] = self.compute
        if not isnan(self.bandwidth):
            shares["bandwidth-bound"] = self.bandwidth
        if not shares:
            return "not known"
        nearest = max(shares, key=lambda name: shares[name])
        return nearest if shares[nearest] >= NEAR else "bound by small pieces"


def words(workload: Workload, *, cuda: bool) -> str:
    """Return one sentence for a person."""
    name, bound = workload.name, workload.bound
    if bound == "not known":
        return f"{name}: neither its arithmetic nor a profile of it is known"
    return f"{name} is {bound}: {_reason(workload, cuda=cuda)}"


def _reason(workload: Workload, *, cuda: bool) -> str:
    compute, bandwidth = workload.compute, workload.bandwidth
    if workload.bound == "launch-bound":
        at_work = "the GPU is" if cuda else "torch's operators are"
        return (
            f"{at_work} at work {workload.busy:.0%} of the time: "
            "the rest is launching, Python and waiting"
        )
    if workload.bound == "compute-bound":
        return (
            f"{compute:.0%} of a large matrix product's speed: "
            "arithmetic is what takes the time"
        )
    if workload.bound == "bandwidth-bound":
        return (
            f"{bandwidth:.0%} of a large copy's speed: "
            "moving bytes is what takes the time"
        )
    return (
        f"mostly at work, but at {_share(compute)} of the arithmetic and at least "
        f"{_share(bandwidth)} of the bandwidth: "
        "kernels are too small to fill the device"
    )


def _share(value: float) -> str:
    return "an unknown share" if isnan(value) else f"{value:.0%}"


def advice(
    workload: Workload, options: dict[str, Any], *, cuda: bool, server: bool
) -> list[str]:
    """Return options that may help, most promising first.

    `options` are all options of the run, `server` says whether the workload is the
    server's.
    """
    if server:
        return _server_advice(workload.bound, options, cuda=cuda)
    return _client_advice(workload.bound, options, cuda=cuda)


def _server_advice(bound: str, options: dict[str, Any], *, cuda: bool) -> list[str]:
    tips = []
    # A graph is one launch: it helps more than anything else.
    if bound == "launch-bound" and cuda and not _captured(options):
        tips.append(
            "let its steps be captured as graphs: --zero-stage below 3, no "
            "accumulation, no checkpointing"
        )
    if bound in ("launch-bound", "bound by small pieces"):
        tips.append(
            "larger batches (--server-batch, --denoiser-batch) with fewer steps; "
            "watch the reconstruction"
        )
    # Half the bytes, and twice the arithmetic per second.
    near_a_ceiling = bound in ("compute-bound", "bandwidth-bound")
    if near_a_ceiling and cuda and options.get("server_precision") != "bf16":
        tips.append("--server-precision bf16")
    if bound == "compute-bound":
        tips.append("more --server-ranks, which share each batch")
    # Whatever limits: what lies in host memory travels twice in every step.
    if options.get("server_offload", "none") != "none":
        tips.append("--server-offload none, if the model fits")
    return tips


def _client_advice(bound: str, options: dict[str, Any], *, cuda: bool) -> list[str]:
    tips = []
    # Client after client, each step launches kernels that fill no GPU.
    if options.get("engine") == "loop":
        tips.append("--engine batched advances all clients of a rank together")
    if bound in ("launch-bound", "bound by small pieces"):
        tips.append(
            "more clients on a rank, stacked --seeds, or a larger --batch-size "
            "fill the device better"
        )
    # Every client is trained on one rank: more ranks have fewer clients each.
    if bound in ("compute-bound", "bandwidth-bound"):
        tips.append("more ranks: the clients are shared out")
    full_precision = options.get("precision") in ("fp32", "fp64")
    if bound == "compute-bound" and cuda and full_precision:
        tips.append("--precision tf32")
    return tips


def _captured(options: dict[str, Any]) -> bool:
    """Return whether the server's steps are CUDA graphs (see server/capture.py)."""
    if options.get("server_micro_batch") or options.get("server_checkpointing"):
        return False
    return int(options.get("zero_stage", 0)) < 3
