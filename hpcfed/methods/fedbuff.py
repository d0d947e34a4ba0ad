"""FedBuff (Nguyen et al. 2022): the server collects B updates as they arrive, and moves
by η_g times their mean, each weighted by s(d), where d is how many versions it is behind.

Algorithm 1: w ← w + η_g Σ weightᵢ s(dᵢ) Δᵢ over the buffer, where Δᵢ is rowᵢ minus the
version that the client was sent, and s(d) = 1 / √(1 + d) unless --staleness says
otherwise. Weights are nᵢ / Σn over the buffer, as in FedAvg; --weights uniform gives
the paper's 1 / B. Running statistics of batch norm are not parameters: the buffer's
mean replaces them.

An update that is not finite counts as one of the B and has no weight.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from hpcfed.errors import count
from hpcfed.methods import _asynchronous, _server_optimiser, _waves, fedavg
from hpcfed.methods._asynchronous import Wave
from hpcfed.methods._interface import Cohort, Federation, Tensor
from hpcfed.methods._server_optimiser import server_rate
from hpcfed.methods._waves import Received
from hpcfed.options import Choice, Need, RunConfig, option
from hpcfed.runtime.device import on_device

EXTENDS = fedavg


def _uploads(run: Any) -> int:
    """Return the uploads of all rounds, or of those among new clients if more."""
    of_new = run.new_rounds * run.cohort_among(run.new_clients)
    return int(max(run.rounds * run.cohort_size, of_new))


def _enough(run: Any) -> str:
    rounds = -(-run.buffer // run.cohort_size)
    return f"--rounds {rounds} or more: {count(_uploads(run), 'upload')} never fill it"


class Options(_asynchronous.Options, _server_optimiser.RateOptions):
    buffer: int = option(
        10,
        "B: number of updates per step of the server, as in 10",
        ge=1,
        counts="uploads",
        needs=Need(_enough, lambda run: run.buffer <= _uploads(run)),
    )

    def fit(self, config: RunConfig, ranks: int) -> Iterable[Choice]:
        yield from super().fit(config, ranks)
        uploads = config.rounds * config.cohort_size
        if uploads < self.buffer:
            yield Choice(
                "buffer",
                config.cohort_size,
                f"the run has only {count(uploads, 'upload')}; --buffer takes others",
            )


@dataclass(frozen=True)
class State(_asynchronous.State):
    buffer: Tensor
    """Σ nᵢ s(dᵢ) Δᵢ of the updates since the last step; Σ nᵢ xᵢ for running statistics.
    With --weights uniform every nᵢ is 1.
    """
    samples: Tensor
    """Σ nᵢ of these updates, float64."""


class Server(NamedTuple):
    """The part of the state that uploads change."""

    w: Tensor
    buffer: Tensor
    samples: Tensor


def init(fed: Federation[Options]) -> State:
    first = _asynchronous.begin(fed, buffer=fed.options.buffer)
    buffer = torch.zeros_like(first.w)
    samples = buffer.new_zeros((), dtype=torch.float64)
    return State(**vars(first), buffer=buffer, samples=samples)


def round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    # Without data no client ever uploads.
    if not fed.num_holders:
        return state
    size = fed.options.buffer
    waves = _asynchronous.waves(fed, state, cohort, buffer=size)
    versions = _asynchronous.rows_of(state, buffer=size)
    server = Server(state.w, state.buffer, state.samples)
    flags, heard = [], state.w.new_zeros(())
    for wave in waves:
        received = _waves.receive(fed, wave, versions)
        sums, samples, num_finite = summed(fed, received, wave)
        rate = server_rate(fed, cohort.round)
        server, made = stepped(fed, server, wave, sums, samples, rate=rate)
        versions = _waves.kept({**versions, **made}, wave)
        flags.append((wave, received.finite))
        heard = heard + num_finite
    # Plan the next round while the device is still computing.
    later = _asynchronous.following(fed, state, cohort.round + 1, buffer=size)
    _waves.exclude(fed, cohort, flags, heard)
    rest = _asynchronous.after(state, versions, *later, buffer=size)
    return State(**server._asdict(), **rest)


def summed(
    fed: Federation[Options], received: Received, wave: Wave
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the wave adds to each buffer that it fills, in order: a row of sums
    and the samples. Also return the number of finite uploads.
    """
    size, cohort, rows = fed.options.buffer, wave.cohort, received.rows
    # The buffer of each member, counted from the one in which the wave begins.
    # Members are in the order of ids; this gives each one's place among all arrivals.
    arrives = wave.first + np.argsort(wave.order)
    buffer_of = arrives // size - wave.first // size
    here = cohort.chosen
    in_buffer = np.arange(buffer_of.max() + 1)[:, None] == buffer_of[here]
    samples = on_device(in_buffer * fed.weights[cohort.clients[here]], rows.device)
    samples = samples * received.finite
    staleness = on_device(wave.weights[here], rows.device).to(rows.dtype)

    updates = rows - received.starts
    parameters = fed.layout.num_parameters
    sums = []
    # Row by row: a GPU would round a matrix product to TensorFloat-32.
    for weights in samples.to(rows.dtype):
        step = (weights * staleness) @ updates[:, :parameters]
        statistics = weights @ rows[:, parameters:]
        sums.append(torch.cat([step, statistics]))
    totals = torch.cat([samples.sum(1), received.finite.sum()[None]])
    totals = fed.sum(totals.double())
    return fed.sum(torch.stack(sums)), totals[:-1], totals[-1]


def stepped(
    fed: Federation[Options],
    server: Server,
    wave: Wave,
    sums: Tensor,
    samples: Tensor,
    *,
    rate: float,
) -> tuple[Server, dict[int, Tensor]]:
    """Return the server after a wave, and the new versions, made at this rate."""
    size = fed.options.buffer
    end = wave.first + len(wave.order)
    made = {}
    with fed.timed("aggregate"):
        for number, row in enumerate(sums):
            buffer = server.buffer + row
            waiting = server.samples + samples[number]
            server = Server(server.w, buffer, waiting)
            version = wave.first // size + number + 1
            # The last buffer of a wave may stay unfilled: it waits in the state.
            if version * size <= end:
                w = made[version] = moved(fed, server, rate)
                server = Server(w, buffer.new_zeros(len(w)), waiting.new_zeros(()))
    return server, made


def moved(fed: Federation[Options], server: Server, rate: float) -> Tensor:
    """Return the row after a step by a full buffer; w if nothing in it was finite."""
    parameters = fed.layout.num_parameters
    # Without samples the sums are 0, and so is the step.
    mean = server.buffer / server.samples.clamp(min=1)
    w = server.w[:parameters] + rate * mean[:parameters]
    before = server.w[parameters:]
    statistics = mean[parameters:].where(server.samples > 0, before)
    return torch.cat([w, statistics])
