"""The run's workloads beside what the device can do: arithmetic and bytes counted on
shapes, divided by the measured ceilings.
"""

from dataclasses import dataclass
from math import isnan, nan

import numpy as np

from hpcfed.config import Settings
from hpcfed.models.layout import Layout
from hpcfed.profile.ceilings import Ceilings
from hpcfed.profile.timeline import PROFILER, ROUNDS, Timeline
from hpcfed.profile.verdict import Workload
from hpcfed.record.run import RunRecord
from hpcfed.record.timing import PHASES
from hpcfed.server.options import NETWORKS, ServerOptions, batching, server_options
from hpcfed.server.schedule import num_steps
from hpcfed.study.estimate import client_network, server_networks, work

PASSES = 10
"""How often a training step of AdamW reads or writes a number for each parameter, at
least: forward and backward pass, the gradient written and read, and weight and both
moments read and written.
"""
ACTIVATION_PASSES = 10
"""How often a training step reads or writes every activation, at least. Forward, a
convolution writes it, a norm reads it for its sums and once more to write it anew, the
next convolution reads that. Backward, a norm reads gradient and activation and writes,
and both gradients of a convolution read.
"""


@dataclass(frozen=True)
class Measured:
    """A finished run, and what was seen and measured of it."""

    settings: Settings
    """With the options that the run recorded."""
    record: RunRecord
    timelines: list[Timeline]
    ceilings: dict[str, Ceilings]
    """By type of number."""
    cuda: bool


def workloads(measured: Measured) -> list[Workload]:
    """Return the clients' training, and both networks of the server if it has one."""
    found = [_clients_training(measured)]
    options = server_options(measured.settings)
    if options is not None and measured.record.learnings:
        for network in NETWORKS:
            found.append(_network_training(measured, options, network))
    return found


def _clients_training(measured: Measured) -> Workload:
    record, ceilings = measured.record, measured.ceilings["float32"]
    train = record.phases[:, :, PHASES.index("train")].mean(1)
    warm_from = max(line.warm for line in measured.timelines)
    warm_rounds = train[warm_from:] if warm_from < len(train) else train
    # The estimate is of a whole run, over all ranks.
    todo = work(measured.settings)
    rounds = measured.settings.config.rounds
    done = record.rounds_done / rounds / record.facts["ranks"]
    return _beside_ceilings(
        "clients' training",
        seconds=float(train.sum()),
        warm=float(warm_rounds.mean()) * record.rounds_done,
        busy=busy(measured.timelines, ROUNDS, cuda=measured.cuda),
        computing=todo.clients * done / ceilings.flops,
        moving=todo.memory_traffic * done / ceilings.bytes_per_second,
    )


def _network_training(
    measured: Measured, options: ServerOptions, network: str
) -> Workload:
    learnings, ceilings = measured.record.learnings, measured.ceilings
    ranks = len(learnings[-1].peak_memory)
    steps = num_steps(options)[network] * len(learnings)
    seconds = sum(learning.seconds[network] for learning in learnings)
    seconds -= _overhead(measured.timelines, network)
    pace = nan
    for line in measured.timelines:
        pace = np.fmax(pace, line.paces.get(network, nan))
    flops = sum(learning.flops[network] for learning in learnings) / ranks
    bf16 = "bfloat16" in ceilings
    moved = 4.0 * PASSES * learnings[-1].parameters[network] * steps
    samples = batching(options, ranks, network).batch // ranks * steps
    activations = _activations(measured.settings, options, network)
    moved += (2.0 if bf16 else 4.0) * ACTIVATION_PASSES * activations * samples
    fastest = ceilings["bfloat16" if bf16 else "float32"]
    return _beside_ceilings(
        network,
        seconds=seconds,
        warm=seconds if isnan(pace) else float(pace) * steps,
        busy=busy(measured.timelines, network, cuda=measured.cuda),
        computing=flops / fastest.flops,
        moving=moved / ceilings["float32"].bytes_per_second,
    )


def _activations(settings: Settings, options: ServerOptions, network: str) -> int:
    """Return the numbers of all activations of one sample."""
    layout = Layout.of(client_network(settings))
    autoencoder, denoiser = server_networks(options, layout)
    trained = autoencoder if network == "autoencoder" else denoiser
    return trained.activations


def _beside_ceilings(
    name: str,
    *,
    seconds: float,
    warm: float,
    busy: float,
    computing: float,
    moving: float,
) -> Workload:
    """Return a workload; `computing` and `moving` are the seconds that its arithmetic
    and its bytes would take at the ceilings.
    """
    compute = computing / warm if warm else nan
    bandwidth = moving / warm if warm else nan
    return Workload(name, seconds, warm, busy, compute, bandwidth)


def _overhead(timelines: list[Timeline], name: str) -> float:
    """Return the seconds that the profiler itself took within a network's training, on
    the rank where it took longest.
    """
    longest = 0.0
    for line in timelines:
        spans = [s for s in line.spans if (s.track, s.name) == (PROFILER, name)]
        longest = max(longest, sum(span.seconds for span in spans))
    return longest


def busy(timelines: list[Timeline], name: str, *, cuda: bool) -> float:
    """Return the share of time at work of the rank that was busy most; NaN where
    nobody has looked.

    On a GPU it is what a step's kernels took, by the pace of steps without the
    profiler, since that slows launches.
    """
    most = nan
    for line in timelines:
        for session in line.sessions:
            if session.name != name:
                continue
            share = session.busy
            pace = line.paces.get(name, 0.0)
            if cuda and pace:
                kernels = session.busy * session.seconds / session.number
                share = min(1.0, kernels / pace)
            most = np.fmax(most, share)
    return float(most)
