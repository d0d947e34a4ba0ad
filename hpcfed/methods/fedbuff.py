"""FedBuff (Nguyen et al. 2022): the server collects B updates as they arrive, and moves
by η_g times their mean, each weighted by s(d), where d is how many versions it is behind.

Algorithm 1: w ← w + η_g Σ weightᵢ s(dᵢ) Δᵢ over the buffer, with Δᵢ = rowᵢ less the
version that the client was given, and s(d) = 1 / √(1 + d) unless --staleness says
otherwise. Weights are nᵢ / Σn of the buffer, as in FedAvg, where the paper has 1 / B.
Running statistics of batch norm are no parameters: the buffer's mean replaces them.

An update that is not finite counts as one of the B and has no weight.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hpcfed.config import option
from hpcfed.methods import _asynchronous, fedavg
from hpcfed.methods._asynchronous import Wave
from hpcfed.methods._interface import Cohort, Federation, Tensor

if TYPE_CHECKING:
    import numpy as np

EXTENDS = fedavg


class Options(_asynchronous.Options):
    buffer: int = option(
        10, "B: updates of which the server makes a step, as in 10", ge=1
    )
    server_lr: float = option(1.0, "η_g, the server's learning rate", gt=0)


@dataclass(frozen=True)
class State(_asynchronous.State):
    buffer: Tensor
    """Σ nᵢ s(dᵢ) Δᵢ of the updates that wait for a step; of running statistics Σ nᵢ xᵢ."""
    samples: Tensor
    """Σ nᵢ of these updates."""


class Server(NamedTuple):
    """What an upload changes."""

    w: Tensor
    buffer: Tensor
    samples: int


def init(fed: Federation[Options]) -> State:
    import torch

    first = _asynchronous.begin(fed)
    buffer = torch.zeros_like(first.w)
    return State(**vars(first), buffer=buffer, samples=torch.tensor(0))


def round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    import torch

    # Nobody will ever arrive.
    if not fed.num_holders:
        return state
    plan = _asynchronous.plan(fed, state, cohort, buffer=fed.options.buffer)
    server = Server(state.w, state.buffer, int(state.samples))
    versions, heard = plan.versions, 0
    for wave in plan.waves:
        starts, rows = _asynchronous.upload(fed, wave, versions)
        sums, samples, finite = summed(fed, starts, rows, wave)
        server, made = stepped(fed, server, wave, sums, samples)
        heard += finite
        versions = _asynchronous.kept({**versions, **made}, wave)
    return State(
        server.w,
        **_asynchronous.end(plan, fed, cohort, versions, heard),
        buffer=server.buffer,
        samples=torch.tensor(server.samples),
    )


def summed(
    fed: Federation[Options], starts: Tensor, rows: Tensor, wave: Wave
) -> tuple[Tensor, "np.ndarray", int]:
    """Return what the wave adds to each buffer that it touches, one after the other: a
    row of sums, and the samples; and how many of its uploads were finite.
    """
    import numpy as np

    everyone = np.arange(len(wave.order))
    sums, samples = _summed(fed, starts, rows, wave, everyone)
    # As in `fed.mean`: look at what was made, at all rows only if it tells.
    if bool(sums.isfinite().all()):
        return sums, samples, len(everyone)
    finite = fed.finite_members(rows, wave.cohort)
    return *_summed(fed, starts, rows, wave, finite), len(finite)


def _summed(
    fed: Federation[Options],
    starts: Tensor,
    rows: Tensor,
    wave: Wave,
    members: "np.ndarray",
) -> tuple[Tensor, "np.ndarray"]:
    """Return sums and samples of some of the wave's members."""
    import numpy as np
    import torch

    size, cohort = fed.options.buffer, wave.cohort
    # When each member arrives, and in which buffer, counted from the one that the wave
    # begins in.
    arrives = wave.first + np.argsort(wave.order)
    buffer_of = arrives // size - wave.first // size
    buffers = np.arange(buffer_of.max() + 1)
    samples = np.zeros((len(buffers), len(wave.order)), np.int64)
    samples[buffer_of[members], members] = fed.sizes[cohort.clients[members]]

    here = cohort.chosen
    updates = rows - starts
    updates *= torch.from_numpy(wave.weights[here, None]).to(rows)
    statistics = slice(fed.layout.num_parameters, None)
    updates[:, statistics] = rows[:, statistics]
    # 0 × NaN is NaN: who has no weight must be 0 as well.
    sound = np.isin(here, members)
    if not sound.all():
        updates[torch.from_numpy(~sound).to(rows.device)] = 0
    weights = torch.from_numpy(samples[:, here]).to(rows)
    # Row by row: a product of matrices would be rounded to TensorFloat-32 on a GPU.
    sums = torch.stack([of_buffer @ updates for of_buffer in weights])
    return fed.sum(sums), samples.sum(1)


def stepped(
    fed: Federation[Options],
    server: Server,
    wave: Wave,
    sums: Tensor,
    samples: "np.ndarray",
) -> tuple[Server, dict[int, Tensor]]:
    """Return the server after a wave, and the versions that it has made."""
    size = fed.options.buffer
    end = wave.first + len(wave.order)
    made = {}
    with fed.timed("aggregate"):
        for number, (row, more) in enumerate(zip(sums, samples.tolist(), strict=True)):
            w, buffer, count = server
            buffer, count = buffer + row, count + more
            version = wave.first // size + number + 1
            if version * size <= end:
                w = _moved(fed, w, buffer, count)
                buffer, count = row.new_zeros(len(row)), 0
                made[version] = w
            server = Server(w, buffer, count)
    return server, made


def _moved(fed: Federation[Options], w: Tensor, buffer: Tensor, samples: int) -> Tensor:
    """Return the row after a step by a full buffer; w if nothing in it was finite."""
    from hpcfed.methods._server_optimiser import moved

    if not samples:
        return w
    mean = buffer / samples
    return moved(w, fed.options.server_lr * mean[: fed.layout.num_parameters], mean)
