"""The run's workloads compared with the device's limits: arithmetic and bytes counted
on shapes, divided by the measured ceilings.
"""

from dataclasses import dataclass
from math import isnan, nan

import numpy as np

from hpcfed.clients.network import client_layout
from hpcfed.options import Settings
from hpcfed.plan.ceilings import Ceilings
from hpcfed.plan.work import memory_traffic, network_sizes
from hpcfed.profile.timeline import PROFILER, ROUNDS, Timeline
from hpcfed.profile.verdict import Workload
from hpcfed.results.run import RunRecord
from hpcfed.runtime.timer import PHASES
from hpcfed.server.options import NETWORKS, ServerOptions, batching, server_options
from hpcfed.server.schedule import num_steps

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
        for network in NETWORKS:
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
    activations = network_sizes(options, layout)[network].activations
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
    """Return a workload of `flops` FLOPs and `moved` bytes; `numbers` is the type that
    it computes in.
    """
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
    """Return the seconds that the profiler itself took within a network's training, on
    the rank where it took longest.
    """
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
