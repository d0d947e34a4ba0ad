"""What limits a workload, in words, and what to change next."""

from dataclasses import dataclass
from math import isnan
from typing import Any

from hpcfed.analysis.noise import MOST_VARIATION

FED = 0.5
"""Below this share of busy time a device mostly waits for launches."""
NEAR = 0.6
"""From this share of a ceiling on, the ceiling is the limit. Below it, something else
is.
"""
LAUNCHES = "launch-bound"
COMPUTE = "compute-bound"
BANDWIDTH = "bandwidth-bound"
NEITHER = "at no ceiling"
UNSTEADY = "near a ceiling that varies"
UNKNOWN = "not known"


@dataclass(frozen=True)
class Workload:
    """The clients' training, or one of the server's networks, compared with the
    device's ceilings.
    """

    name: str
    seconds: float
    """Seconds over the whole run."""
    warm: float
    """Seconds at the pace of the last rounds or steps, without choosing and capturing
    kernels.
    """
    busy: float
    """The share of busy time; NaN without a profiler session."""
    compute: float
    """Achieved arithmetic divided by the measured ceiling (MFU), when warm."""
    bandwidth: float
    """Minimum bytes to move, per second, divided by the measured ceiling, when warm."""
    numbers: str = "float32"
    """The number type whose matrix products set the ceiling of its arithmetic."""
    variation: float = 0.0
    """Relative variation of the ceilings' trials."""

    @property
    def bound(self) -> str:
        """Name what limits the workload."""
        # Checked first: a waiting device is not near any ceiling.
        if not isnan(self.busy) and self.busy < FED:
            return LAUNCHES
        # An unknown ceiling cannot be the limit.
        shares = {}
        if not isnan(self.compute):
            shares[COMPUTE] = self.compute
        if not isnan(self.bandwidth):
            shares[BANDWIDTH] = self.bandwidth
        if not shares:
            return UNKNOWN
        nearest = max(shares, key=lambda name: shares[name])
        if shares[nearest] < NEAR:
            return NEITHER
        # A ceiling that was measured too low seems near.
        return nearest if self.variation <= MOST_VARIATION else UNSTEADY


def words(workload: Workload, *, cuda: bool) -> str:
    """Return one sentence for the reader."""
    name, bound = workload.name, workload.bound
    if bound == UNKNOWN:
        return f"{name}: neither its arithmetic nor a profile of it is known"
    return f"{name} is {bound}: {_reason(workload, cuda=cuda)}"


def _reason(workload: Workload, *, cuda: bool) -> str:
    compute, bandwidth = workload.compute, workload.bandwidth
    if workload.bound == LAUNCHES:
        at_work = "the GPU is" if cuda else "torch's operators are"
        return (
            f"{at_work} at work {workload.busy:.0%} of the time: "
            "the rest is launching, Python and waiting"
        )
    if workload.bound == COMPUTE:
        return (
            f"{compute:.0%} of a large matrix product's speed: "
            "arithmetic is what takes the time"
        )
    if workload.bound == BANDWIDTH:
        return (
            f"{bandwidth:.0%} of a large copy's speed: "
            "moving bytes is what takes the time"
        )
    reached = (
        f"{_share(compute)} of the arithmetic and at least {_share(bandwidth)} of the "
        "bandwidth"
    )
    if workload.bound == UNSTEADY:
        return (
            f"{reached}, of speeds whose trials vary by {workload.variation:.0%}: the "
            "machine was not quiet"
        )
    at_work = (
        "" if isnan(workload.busy) else f"at work {workload.busy:.0%} of the time, "
    )
    return f"{at_work}at {reached}: larger pieces would use more of it"


def _share(value: float) -> str:
    if isnan(value):
        return "an unknown share"
    return f"{value:.0%}" if value >= 0.1 else f"{value:.1%}"


def advice(
    workload: Workload, options: dict[str, Any], *, cuda: bool, server: bool
) -> list[str]:
    """Return options that may help, most promising first.

    `options` are all options of the run; `server` says whether the workload is the
    server's.
    """
    if server:
        tips = _server_advice(workload.bound, options, cuda=cuda)
    else:
        tips = _client_advice(workload.bound, options, cuda=cuda)
    if workload.bound == UNSTEADY:
        tips.append(
            "measure again on a machine for yourself (sbatch --exclusive), with ranks "
            "pinned to cores"
        )
    return tips


def _server_advice(bound: str, options: dict[str, Any], *, cuda: bool) -> list[str]:
    tips = []
    # A graph is a single launch, so it helps most.
    if bound == LAUNCHES and cuda and not _captured(options):
        tips.append(
            "let its steps be captured as graphs: --zero-stage below 3, no "
            "accumulation, no checkpointing"
        )
    if bound in (LAUNCHES, NEITHER):
        tips.append(
            "larger batches (--server-batch, --denoiser-batch) with fewer steps; "
            "watch the reconstruction"
        )
    # Half the bytes, and twice the arithmetic per second.
    near_a_ceiling = bound in (COMPUTE, BANDWIDTH)
    if near_a_ceiling and cuda and options.get("server_precision") != "bf16":
        tips.append("--server-precision bf16")
    if bound == COMPUTE:
        tips.append("more --server-ranks, which share each batch")
    if bound == BANDWIDTH:
        tips.append(
            "larger batches (--server-batch, --denoiser-batch) with fewer steps: weights "
            "and moments travel once a step"
        )
    # Independent of the limit: data in host memory is transferred twice per step.
    if options.get("server_offload", "none") != "none":
        tips.append("--server-offload none, if the model fits")
    return tips


def _client_advice(bound: str, options: dict[str, Any], *, cuda: bool) -> list[str]:
    tips = []
    # The loop trains one client at a time, and its kernels are too small to fill a GPU.
    if options.get("engine") == "loop":
        tips.append("--engine batched advances all clients of a rank together")
    if bound in (LAUNCHES, NEITHER):
        tips.append(
            "more clients on a rank, stacked --seeds, or a larger --batch-size "
            "fill the device better"
        )
    # Each client is trained on one rank, so with more ranks each has fewer clients.
    if bound in (COMPUTE, BANDWIDTH):
        tips.append("more ranks: the clients are shared out")
    full_precision = options.get("precision") in ("fp32", "fp64")
    if bound == COMPUTE and cuda and full_precision:
        tips.append("--precision tf32")
    return tips


def _captured(options: dict[str, Any]) -> bool:
    """Tell whether the server's steps are CUDA graphs (see server/capture.py)."""
    if options.get("server_micro_batch") or options.get("server_checkpointing"):
        return False
    return int(options.get("zero_stage", 0)) < 3
