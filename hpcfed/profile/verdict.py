"""What limits a workload, in words, and what to change next."""

from dataclasses import dataclass
from math import isnan, nan
from typing import Any

import numpy as np

from hpcfed.analysis.groups import MOST_VARIATION
from hpcfed.clients.network import client_layout
from hpcfed.options import Settings
from hpcfed.plan.speeds import Ceilings
from hpcfed.plan.work import memory_traffic, network_sizes
from hpcfed.profile.timeline import PROFILER, Timeline
from hpcfed.results.profiles import ROUNDS
from hpcfed.results.run import RunRecord
from hpcfed.runtime.timer import PHASES
from hpcfed.server.options import ServerOptions, batching, server_options
from hpcfed.server.schedule import num_steps

FED = 0.5
"""Below this share of busy time a device mostly waits for launches."""
NEAR = 0.6
"""From this share of a ceiling on, the ceiling is the limit."""
LAUNCHES = "launch-bound"
COMPUTE = "compute-bound"
BANDWIDTH = "bandwidth-bound"
NEITHER = "at no ceiling"
UNSTEADY = "near a ceiling that varies"
UNKNOWN = "not known"


@dataclass(frozen=True)
class Workload:
    """The clients' training, or a network of the server, beside the ceilings."""

    name: str
    seconds: float
    """Seconds over the whole run."""
    warm: float
    """Seconds at the pace of the last rounds or steps, once kernels are chosen."""
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
    """Return what may help, most promising first; `options` are those of the run."""
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


PASSES = 10
"""Minimum number of times that a training step of AdamW reads or writes a number for
each parameter: forward and backward pass, the gradient written and read, and weight and
both moments read and written.
"""
ACTIVATION_PASSES = 10
"""Minimum number of times that a training step reads or writes every activation.
Forward, a convolution writes it, a norm reads it for its sums and once more to write it
anew, and the next convolution reads that. Backward, a norm reads gradient and
activation and writes, and both gradients of a convolution read.
"""
TRAINED = ("trained_samples", "trained_steps", "train_flops")
"""Series that the rounds' log has counted."""


@dataclass(frozen=True)
class ProfiledRun:
    """A finished run, and what was recorded and measured about it."""

    settings: Settings
    """With the options that the run recorded."""
    record: RunRecord
    timelines: list[Timeline]
    ceilings: dict[str, Ceilings]
    """By number type."""
    cuda: bool


def workloads(measured: ProfiledRun) -> list[Workload]:
    """Return the clients' training, and both networks of the server if there is one."""
    found = [_clients_training(measured)]
    options = server_options(measured.settings)
    if options is not None and measured.record.learnings:
        for network in options.networks:
            found.append(_network_training(measured, options, network))
    return found


def _clients_training(measured: ProfiledRun) -> Workload:
    record = measured.record
    # Seconds by round, as the mean over ranks.
    phase = PHASES.index("train")
    train = record.phases[:, :, phase].mean(1)
    # A short run may have no round after the profiled ones.
    warm_from = max(line.warm for line in measured.timelines)
    warm = train[warm_from:] if warm_from < len(train) else train
    # What clients have trained in these rounds, over all ranks.
    trained = {name: record.rounds[name][-len(warm) :].sum() for name in TRAINED}
    whole = record.rounds_done / len(warm) / record.facts["ranks"]
    moved = memory_traffic(
        measured.settings.config,
        samples=float(trained["trained_samples"]),
        steps=float(trained["trained_steps"]),
    )
    return _beside_ceilings(
        "clients' training",
        seconds=float(train.sum()),
        warm=float(warm.mean()) * record.rounds_done,
        busy=busy(measured.timelines, ROUNDS, cuda=measured.cuda),
        flops=float(trained["train_flops"]) * whole,
        moved=moved * whole,
        ceilings=measured.ceilings,
        numbers="float32",
    )


def _network_training(
    measured: ProfiledRun, options: ServerOptions, network: str
) -> Workload:
    learnings = measured.record.learnings
    timelines = measured.timelines
    ceilings = measured.ceilings
    ranks = len(learnings[-1].peak_memory)
    steps = num_steps(options)[network] * len(learnings)
    seconds = flops = 0.0
    for learning in learnings:
        seconds += learning.seconds[network]
        flops += learning.flops[network]
    # A run without the profiler does not have its overhead.
    seconds -= _overhead(timelines, network)
    pace = _slowest_pace(timelines, network)
    warm = seconds if isnan(pace) else pace * steps
    # Weights and moments are float32, even if passes compute in bfloat16.
    parameters = learnings[-1].parameters[network]
    moved = 4.0 * PASSES * parameters * steps
    # Each rank has its share of each batch, but all parameters.
    batch = batching(options, ranks, network).batch
    samples = batch // ranks * steps
    layout = client_layout(measured.settings.config)
    sizes = network_sizes(options, layout, rows=learnings[-1].rows)
    activations = sizes[network].activations
    bf16 = "bfloat16" in ceilings
    size = 2.0 if bf16 else 4.0
    moved += size * ACTIVATION_PASSES * activations * samples
    return _beside_ceilings(
        network,
        seconds=seconds,
        warm=warm,
        busy=busy(timelines, network, cuda=measured.cuda),
        flops=flops / ranks,
        moved=moved,
        ceilings=ceilings,
        numbers="bfloat16" if bf16 else "float32",
    )


def _slowest_pace(timelines: list[Timeline], network: str) -> float:
    """Return the seconds of a warm step on the slowest rank; NaN if there was none."""
    slowest = nan
    for line in timelines:
        pace = line.paces.get(network, nan)
        slowest = float(np.fmax(slowest, pace))
    return slowest


def _beside_ceilings(
    name: str,
    *,
    seconds: float,
    warm: float,
    busy: float,
    flops: float,
    moved: float,
    ceilings: dict[str, Ceilings],
    numbers: str,
) -> Workload:
    """Return a workload of these FLOPs and moved bytes, computed in `numbers`."""
    arithmetic, copies = ceilings[numbers], ceilings["float32"]
    # A phase may take no time at all, if no client had anything to train.
    return Workload(
        name,
        seconds,
        warm,
        busy,
        compute=flops / arithmetic.flops / warm if warm else nan,
        bandwidth=moved / copies.bytes_per_second / warm if warm else nan,
        numbers=numbers,
        variation=max(arithmetic.variation, copies.variation),
    )


def _overhead(timelines: list[Timeline], name: str) -> float:
    """Return the profiler's own seconds in a network's training, on the worst rank."""
    longest = 0.0
    for line in timelines:
        seconds = 0.0
        for span in line.spans:
            if span.track == PROFILER and span.name == name:
                seconds += span.seconds
        longest = max(longest, seconds)
    return longest


def busy(timelines: list[Timeline], name: str, *, cuda: bool) -> float:
    """Return the share of busy time on the busiest rank; NaN without a profiler
    session.

    On a GPU, divide the kernel time of a step by the pace of steps without the
    profiler, since the profiler slows launches.
    """
    most = nan
    for line in timelines:
        for session in line.sessions:
            if session.name != name:
                continue
            # On a CPU the profiler slows the operators, too, so the share stays right.
            share = session.busy
            pace = line.paces.get(name, 0.0)
            if cuda and pace:
                kernels = session.busy * session.seconds / session.number
                share = min(1.0, kernels / pace)
            most = np.fmax(most, share)
    return float(most)
