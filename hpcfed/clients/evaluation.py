"""Scores of rows on clients' data: a stack of rows, or one row for all clients.

Memory and steps are kept for a shard that is evaluated again, so that on a GPU the steps
are captured and replayed like those of training.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcfed.clients.capture import Replays
from hpcfed.clients.lengths import text_lengths
from hpcfed.clients.objective import OBJECTIVES, Sums, Wanted
from hpcfed.clients.schedule import (
    Length,
    evaluation_samples,
    rounded_shape,
    rounded_up,
    step_shapes,
)
from hpcfed.data.shards import Shard
from hpcfed.kernels.batch import MOST_CLIENTS, gather_inputs, gatherable, of_step
from hpcfed.kernels.cuda import without_trials
from hpcfed.models.cost import Cost
from hpcfed.models.forward import Forward
from hpcfed.models.kernel_layout import KernelLayout, KernelRows
from hpcfed.runtime.accelerator import is_gpu
from hpcfed.runtime.device import on_device

EVALUATION_SAMPLES = 4096
"""Samples in flight during evaluation, over all clients of a stack."""
EVALUATION_FLOATS = 2**28
"""Activations of the samples in flight; a sample may be a long text."""
BASE_FLOATS = 2**30
"""Activations of the samples in flight over a frozen network in bfloat16, which is on a
GPU: 4 GiB. Some thousand tokens of a large vocabulary fill it, and the GPU.
"""
LAYERS = 16
"""Layers among which training's activations are shared, roughly: evaluation holds those
of one layer at a time.
"""
LOGITS = 2
"""Floats per logit in evaluation: itself in float32, and its log-softmax."""


def samples_in_flight(shard: Shard, cost: Cost, *, over_halves: bool = False) -> int:
    """Return how many samples are evaluated at once."""
    # Classification uses a fixed number: its batches influence recorded results.
    if shard.task == "classification":
        return EVALUATION_SAMPLES
    floats, most = cost.activations, EVALUATION_FLOATS
    if over_halves:
        floats, most = floats // LAYERS + LOGITS * cost.outputs, BASE_FLOATS
    return max(1, min(EVALUATION_SAMPLES, most // max(1, floats)))


class Judged(NamedTuple):
    """What is evaluated: some network on a shard, for these sums."""

    network: Forward
    layout: KernelLayout
    shard: Shard
    wanted: Wanted
    dtype: torch.dtype
    """The type of the rows."""
    in_flight: int
    """Samples that are evaluated at once."""
    captured: bool
    """Whether steps on a GPU are captured; their memory then stays reserved."""
    lengths: int = 1
    """How many lengths steps on texts may have."""


class _Evaluation:
    """The memory of rows in evaluation, and one step on it."""

    def __init__(self, judged: Judged) -> None:
        self._judged = judged
        self._shard = judged.shard
        self._device = judged.shard.inputs.device
        self._inputs = judged.shard.inputs
        self._on_gpu = is_gpu(self._device)
        if self._on_gpu:
            self._inputs = gatherable(self._inputs)
        self._objective = OBJECTIVES[judged.shard.task]
        network = judged.network
        self._lengths = text_lengths(
            network, judged.shard, judged.lengths, training=False
        )
        self._replays = Replays(
            self._device,
            on=judged.captured and network.captures,
            may_fail=network.capture_may_fail,
        )
        # Shapes are rounded up, so that a few captured steps serve all of them.
        self._rounds_up = judged.captured and self._on_gpu
        self._like = torch.zeros((), dtype=judged.dtype, device=self._device)
        # On the device: a captured step must read it there.
        self._step = torch.zeros(1, dtype=torch.int64, device=self._device)

    def _integers(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self._device)

    def _reserve_rows(self, clients: int) -> None:
        # Graphs hold addresses of the memory that is replaced here.
        self._replays.forget()
        self._rows = self._judged.layout.zeros(clients, self._like)

    def _load(self, rows: Tensor) -> None:
        parameters, statistics = self._rows
        first = parameters[: len(rows)], statistics[: len(rows)]
        self._judged.layout.load(rows, first)

    def _figures(
        self, rows: KernelRows, samples: Tensor, clients: int, slots: int, length: int
    ) -> Sums:
        """Return what each sample of this step adds to the sums, [clients · slots, …].

        `rows` are the first clients', and `samples` is a table [steps, clients, slots].
        Texts have no more than `length` positions; 0: all of them.
        """
        tensors = self._judged.layout.views(*rows)
        chosen = samples.index_select(0, self._step)[0, :clients, :slots].flatten()
        if self._on_gpu:
            inputs = gather_inputs(self._inputs, samples, self._step, clients, slots)
        else:
            inputs = self._inputs.index_select(0, chosen)
        targets = self._shard.targets.index_select(0, chosen)
        if length:
            inputs = inputs[..., :length].contiguous()
            targets = targets[:, :length]
        # Batches of many sizes: cuDNN's trials would take longer than the passes.
        with without_trials(unless=self._judged.captured):
            outputs = self._judged.network(tensors, inputs)
        return self._objective.figures(outputs, targets, self._judged.wanted)


class _Plan(NamedTuple):
    """How a stack of clients is evaluated."""

    clients: int
    """At least as many as the stack has."""
    slots: int
    """Samples of a client in a step."""
    steps: int


class StackEvaluation(_Evaluation):
    """Judges each client's own row on its own data, many clients at a time."""

    def __init__(self, judged: Judged) -> None:
        super().__init__(judged)
        self._longest = int(judged.shard.samples.max(initial=1))
        self._index = judged.shard.index
        if self._lengths is not None:
            sizes = on_device(judged.shard.samples, self._device)[:, None]
            owned = torch.arange(self._index.shape[1], device=self._device) < sizes
            _, self._index, self._sorted = self._lengths.longest_first(
                self._index, owned
            )
        self._capacity = 0
        self._loaded = np.empty((2, 0), np.int64)
        """What `_stack` holds."""

    def run(self, rows: Tensor, clients: np.ndarray) -> Sums:
        """Return sums over the data of clients, ordered by size, largest first."""
        count = len(rows)
        plan = self._plan(count)
        self._reserve(plan.clients)
        self._load(rows)
        sizes = self._shard.samples[clients]
        # Clients that only pad the stack have no samples.
        stack = np.zeros((2, plan.clients), np.int64)
        stack[:, :count] = clients, sizes
        # Usually the clients are the same as last time.
        if not np.array_equal(stack, self._loaded):
            self._stack[:, : plan.clients].copy_(on_device(stack, self._device))
            self._loaded = stack
        self._replays.run(plan, partial(self._begin, plan))
        shapes = step_shapes(sizes, Length(1, plan.slots))
        for step, shape in enumerate(shapes):
            length = 0
            if self._lengths is not None:
                length = int(self._sorted[clients, step * plan.slots].max())
            if self._rounds_up:
                shape = rounded_shape(shape, plan.clients, plan.slots)
            wide = shape.clients, shape.slots
            add = partial(self._add, plan, *wide, length)
            self._replays.run((plan, wide, length), add)
        return {name: values[:count].clone() for name, values in self._sums.items()}

    def _plan(self, count: int) -> _Plan:
        clients = count
        if self._rounds_up:
            clients = min(rounded_up(count, 8), MOST_CLIENTS)
        # The fewer clients, the larger their batches: the device is always full.
        most = min(self._longest, -(-self._judged.in_flight // clients))
        steps = -(-self._longest // most)
        # Equal batches, rather than full ones and a small remainder.
        return _Plan(clients, -(-self._longest // steps), steps)

    def _reserve(self, clients: int) -> None:
        """Make the memory large enough; captured steps are lost if it moves."""
        if clients <= self._capacity:
            return
        self._capacity = clients
        self._reserve_rows(clients)
        self._stack = self._integers(2, clients)
        self._loaded = np.empty((2, 0), np.int64)
        self._tables: dict[_Plan, tuple[Tensor, Tensor]] = {}
        self._sums = self._objective.zeros(clients, self._like, self._judged.wanted)

    def _begin(self, plan: _Plan) -> None:
        """Look up the clients' samples, and set step and sums to zero."""
        clients, sizes = self._stack[:, : plan.clients]
        found = evaluation_samples(
            self._index[clients], sizes, batch_size=plan.slots, steps=plan.steps
        )
        for table, values in zip(self._table(plan), found, strict=True):
            table.copy_(values)
        self._step.zero_()
        for values in self._sums.values():
            values.zero_()

    def _table(self, plan: _Plan) -> tuple[Tensor, Tensor]:
        """Return samples [steps, clients, slots] and their counts [steps, clients]."""
        if plan not in self._tables:
            samples = self._integers(plan.steps, plan.clients, plan.slots)
            counts = self._integers(plan.steps, plan.clients)
            self._tables[plan] = samples, counts
        return self._tables[plan]

    def _add(self, plan: _Plan, clients: int, slots: int, length: int) -> None:
        """Add a step of the first clients to the sums."""
        samples, counts = self._table(plan)
        parameters, statistics = self._rows
        rows = parameters[:clients], statistics[:clients]
        figures = self._figures(rows, samples, clients, slots, length)
        _, _, valid = of_step(samples, counts, self._step, clients, slots)
        for name, figure in figures.items():
            by_client = figure.unflatten(0, (clients, slots))
            # One mask for all figures of a sample: [clients, slots, 1, …]. Slots beyond
            # a client's samples hold some other sample, which must not count.
            mask = valid.view(clients, slots, *(1 for _ in figure.shape[1:]))
            self._sums[name][:clients] += torch.where(mask, by_client, 0).sum(1)
        self._step += 1


class RowEvaluation(_Evaluation):
    """Judges one row on the data of many clients.

    The row is a stack of one, so that samples of all clients fill a batch together. If
    our own kernels are faster, which need several clients, the row is a stack of copies
    that share the same memory.
    """

    def __init__(self, judged: Judged) -> None:
        super().__init__(judged)
        self._copies = 1
        if judged.captured:
            self._copies = judged.network.copies(self._like)
        self._clients = np.empty(0, np.int64)
        """The clients whose samples are currently looked up."""
        self._samples = self._owners = self._integers(0)
        self._capacity = 0

    def run(self, row: Tensor, clients: np.ndarray) -> Sums:
        """Return sums over each client's data, judged by a row [1, columns]."""
        total = int(self._shard.samples[clients].sum())
        # Equal batches, rather than full ones and a small remainder.
        steps = -(-total // self._judged.in_flight)
        slots = self._slots(total, steps) if total else 0
        self._reserve(len(clients), steps * slots)
        # Usually the clients are the same as last time.
        if not np.array_equal(clients, self._clients):
            self._look_up(clients, total)
        self._load(row)
        self._replays.run("begin", self._begin)
        for step in range(steps):
            length = 0
            if self._lengths is not None:
                length = int(self._sorted[step * slots])
            self._replays.run((slots, length), partial(self._add, slots, length))
        first_clients = slice(1, 1 + len(clients))
        sums = {}
        for name, values in self._sums.items():
            sums[name] = values[first_clients].to(self._types[name], copy=True)
        return sums

    def _slots(self, total: int, steps: int) -> int:
        """Return the samples of a step, a multiple of the copies of the row."""
        of_copy = -(-total // (steps * self._copies))
        if self._rounds_up:
            of_copy = rounded_up(of_copy, 32)
        return self._copies * of_copy

    def _reserve(self, clients: int, samples: int) -> None:
        """Make the memory large enough; captured steps are lost if it moves."""
        if clients <= self._capacity and samples <= len(self._samples):
            return
        self._capacity = max(clients, self._capacity)
        self._reserve_rows(1)
        self._samples = self._integers(max(samples, len(self._samples)))
        self._owners = torch.zeros_like(self._samples)
        self._clients = np.empty(0, np.int64)
        # In float64, because a client's samples are added one by one. The first row
        # takes samples that only pad a batch.
        exact = self._like.double()
        wanted = self._judged.wanted
        self._sums = self._objective.zeros(1 + self._capacity, exact, wanted)
        plain = self._objective.zeros(0, self._like, wanted)
        self._types = {name: values.dtype for name, values in plain.items()}

    def _look_up(self, clients: np.ndarray, total: int) -> None:
        """List all samples of these clients in a row, and the owner of each."""
        sizes = on_device(self._shard.samples[clients], self._device)
        number = torch.arange(len(clients), device=self._device)
        owners = torch.repeat_interleave(number, sizes, output_size=total)
        first = sizes.cumsum(0) - sizes
        slot = torch.arange(total, device=self._device) - first[owners]
        of_shard = on_device(clients, self._device)[owners]
        samples = self._shard.index[of_shard, slot]
        if self._lengths is not None:
            everything = torch.ones_like(samples, dtype=torch.bool)
            order, samples, self._sorted = self._lengths.longest_first(
                samples, everything
            )
            owners = owners[order]
        self._samples[:total] = samples
        self._owners.zero_()
        # Row 0 of the sums belongs to no client, see `_reserve`.
        self._owners[:total] = 1 + owners
        self._clients = clients.copy()

    def _begin(self) -> None:
        self._step.zero_()
        for values in self._sums.values():
            values.zero_()

    def _add(self, slots: int, length: int) -> None:
        """Add the next batch to the sums."""
        steps = len(self._samples) // slots
        copies = self._copies
        samples = self._samples[: steps * slots].view(steps, copies, slots // copies)
        owners = self._owners[: steps * slots].view(steps, slots)
        parameters, statistics = self._rows
        # Not repeat: the copies share one row's memory, so loading a row fills all of
        # them.
        rows = parameters.expand(copies, -1), statistics.expand(copies, -1)
        figures = self._figures(rows, samples, copies, slots // copies, length)
        owner = owners.index_select(0, self._step)[0]
        # A batch may span many clients, and a client many batches.
        for name, figure in figures.items():
            self._sums[name].index_add_(0, owner, figure.double())
        self._step += 1
