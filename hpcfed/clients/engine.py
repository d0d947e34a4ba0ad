"""The engine: advances the rows of many clients together, or one after the other.

All modes are the same program over stacks of clients. "batched" and "vmap" stack as
many clients as memory allows. They differ in how the network is called for many clients
at once, see `models.choice`. "loop" uses stacks of one, which run torch's own kernels.
It is for networks that nearly fill the device alone, or that cannot be called
otherwise. On a GPU several stacks of one train concurrently, see `lanes`.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from hpcfed.clients.differentiation import TrainableColumns
from hpcfed.clients.evaluation import (
    Judged,
    RowEvaluation,
    StackEvaluation,
    samples_in_flight,
)
from hpcfed.clients.fisher import Fisher
from hpcfed.clients.footprint import Checkpointing, Footprint, planned_step
from hpcfed.clients.job import Losses, Score, TrainingJob
from hpcfed.clients.lanes import Lanes, Task, take_turns
from hpcfed.clients.lengths import LENGTHS
from hpcfed.clients.objective import NOTHING, OBJECTIVES, Sums, Wanted
from hpcfed.clients.schedule import Length, work_of
from hpcfed.clients.stacks import COPIES, COPIES_OVER_HALVES, Stacks, num_matrices
from hpcfed.clients.training import StackTraining
from hpcfed.data.shards import Shard
from hpcfed.models.choice import Way, choose
from hpcfed.models.cost import Cost, Kept, cost, kept_floats
from hpcfed.models.kernel_layout import KernelLayout
from hpcfed.models.layout import Layout
from hpcfed.models.own import Sample, sample_through
from hpcfed.models.stack import StackedNetwork
from hpcfed.runtime.accelerator import is_gpu
from hpcfed.runtime.device import on_device

_CPU = torch.device("cpu")
LOOP_ABOVE_COLUMNS = 4_000_000
"""`auto` trains larger networks in stacks of one: a batch nearly fills a device."""
LANES = 5
"""Stacks of one that train concurrently on a GPU. Measured on an H200: the steps of ten
ResNet-18 take 1.34 s one after the other, 0.92 s in five lanes, and 0.95 to 0.98 s in
ten, which need twice the memory.
"""
EVALUATIONS = 4
"""Kinds of evaluation whose memory and captured steps are kept: clients' test data, the
global test set, and two more, for example for new clients' data or other sums.
"""
_Evaluations = tuple[RowEvaluation, StackEvaluation]


class Engine:
    def __init__(
        self,
        network: nn.Module,
        layout: Layout,
        *,
        shape: tuple[int, ...],
        mode: Literal["auto", "batched", "vmap", "loop"] = "auto",
        bf16: bool = False,
        trial: Sample | None = None,
        lengths: int = LENGTHS,
        batch_size: int = 1,
        checkpointing: Checkpointing = "off",
        device: torch.device = _CPU,
    ) -> None:
        """Prepare for samples of this shape.

        `bf16` lets a GPU compute in bfloat16 if a client is alone in its stack, or if
        clients share a frozen network; rows keep their type. A user's network may
        contain anything, so it is tried out on samples as `trial` describes. Networks
        of the catalogue are known to stack. Steps on texts have one of `lengths`
        lengths, see `lengths.py`. `checkpointing`: whether blocks compute activations
        again; auto: if a step of `batch_size` would not fit.
        """
        self.layout = layout
        self._lengths = lengths
        # Only GPUs are faster in bfloat16.
        bf16 = bf16 and is_gpu(device)
        # Resolved once: the run records and prints which mode it is.
        if mode == "auto" and self._fills_device(network):
            mode = "loop"
        self.cost: Cost = cost(network, trial or Sample(shape, ()))
        """What one sample costs."""
        kept = None
        if trial is None and mode != "vmap":
            stacked = StackedNetwork(network, layout, bf16=bf16, halves=True)
            way = Way(stacked, "loop" if mode == "loop" else "batched")
        else:
            trial = trial or sample_through(network, shape)
            way = choose(network, layout, trial, mode=mode, bf16=bf16, device=device)
            kept = kept_floats(network, trial)
            # Those of layers, if that is more than what a pass keeps.
            activations = max(self.cost.activations, kept.total)
            kept = replace(kept, total=activations)
            self.cost = replace(self.cost, activations=activations)
        self._network = way.forward
        self.mode = way.mode
        self.reason = way.reason
        """Why clients are not advanced in a faster way; empty if they are."""
        over_halves = self._network.over_halves
        self.bf16 = bf16 and (self.mode == "loop" or over_halves)
        """Whether clients compute in bfloat16: those alone in their stack, and those
        that share a frozen network.
        """
        alone = self.mode == "loop"
        self.fisher = Fisher(network, layout, self.cost, bf16=bf16 and alone)
        """Diagonals of the Fisher information of rows."""
        self._kernel_layouts: dict[torch.device, KernelLayout] = {}
        self._trainings: dict[tuple[object, ...], StackTraining] = {}
        self._evaluations: OrderedDict[tuple[object, ...], _Evaluations] = OrderedDict()
        self._lanes: dict[torch.device, Lanes] = {}
        self._positions: tuple[tuple[bytes, torch.device], Tensor, Tensor] | None = None
        """The last positions of clients in training, also on the device."""
        copies = COPIES_OVER_HALVES if over_halves else COPIES
        planned = planned_step(
            network,
            self._network,
            kept or Kept(self.cost.activations),
            layout=layout,
            asked=checkpointing,
            copies=copies,
            batch_size=batch_size,
            device=device,
        )
        self.footprint: Footprint | None = planned.footprint
        """What clients over a large frozen network take; None without one."""
        self.stacks = Stacks(
            columns=layout.num_columns,
            activations=planned.activations,
            alone=alone,
            copies=copies,
        )
        self.samples = 0
        """Samples of all steps so far."""

    def _fills_device(self, network: nn.Module) -> bool:
        """Tell whether one client's batch nearly fills a device. Not if most of the
        network is frozen: then all clients' samples go through it together.
        """
        columns = self.layout.num_columns
        parameters = sum(p.numel() for p in network.parameters())
        return columns > LOOP_ABOVE_COLUMNS and parameters < 2 * columns

    @property
    def halvings(self) -> int:
        """How often stacks were halved because memory ran out."""
        return self.stacks.halvings

    def train(self, job: TrainingJob) -> tuple[Tensor, Losses]:
        """Train each row on its client's data; a client without data keeps its row.

        Returns new rows, and each client's loss in training.
        """
        rows, work = job.rows, job.work
        self.samples += work.samples
        # Not empty_like: the rows may be a single row, expanded.
        trained = rows.new_empty(rows.shape)
        has_lanes = self._has_lanes(rows) and len(work.order) > 1
        # Before lanes open, which have streams of their own; else when first needed.
        losses = _no_losses(job) if has_lanes else None

        def put(at: Tensor | slice, found: Losses) -> None:
            """Take over the losses of some clients."""
            nonlocal losses
            if losses is None:
                losses = _no_losses(job)
            losses.put(at, found)

        def one_by_one(members: np.ndarray) -> None:
            tasks = [partial(alone, int(member)) for member in members]
            self._take_turns(tasks, job)

        def alone(member: int, lane: int) -> Iterator[None]:
            """Train one client in a lane."""
            training = self._training(job, lane)
            only = slice(member, member + 1)
            found = yield from training.steps(
                job.subset(np.array([member])), trained[only]
            )
            put(only, found)

        def advance(members: np.ndarray) -> None:
            nonlocal losses
            training = self._training(job)
            # All clients in their order, which is usual if all have equally much to do:
            # nothing needs to be gathered.
            if work.in_order and len(members) == len(rows):
                losses = training.run(job, trained)
                return
            at, back = self._there_and_back(members, rows.device)
            members_trained = torch.empty_like(trained[: len(members)])
            found = training.run(job.subset(members, at), members_trained)
            if len(members) == len(rows):
                # All clients in another order: each is looked up where it was trained.
                torch.index_select(members_trained, 0, back, out=trained)
                losses = found.only(back)
                return
            put(at, found)
            trained[at] = members_trained

        # It leaves out clients without data, or without time for a step.
        order = work.order
        if len(order) < len(rows):
            idle = on_device(np.flatnonzero(work.steps == 0), rows.device)
            trained[idle] = 0 if job.recipe.gradient else rows[idle]
        # Longest clients first, so that clients of a stack have about the same number
        # of steps and few rows idle.
        ids = job.shard.clients[job.clients]
        if has_lanes:
            self.stacks.halving(one_by_one, order, ids, "training", free=self.forget)
            return trained, losses or _no_losses(job)
        batch_size, matrices = job.recipe.batch_size, num_matrices(job)
        for members in self.stacks.cut(order, batch_size, rows, matrices=matrices):
            self.stacks.halving(advance, members, ids, "training", free=self.forget)
        return trained, losses or _no_losses(job)

    def _there_and_back(
        self, members: np.ndarray, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return positions on the device, and where each is among them, ascending."""
        # Usually those of the last round, which need not travel again.
        key = (members.tobytes(), device)
        if self._positions is None or self._positions[0] != key:
            back = on_device(np.argsort(members), device)
            self._positions = key, on_device(members.copy(), device), back
        return self._positions[1:]

    def _has_lanes(self, rows: Tensor) -> bool:
        """Tell whether stacks of one may train concurrently: a user's module may hold on
        to tensors in ways that we cannot know.
        """
        known = self._network.captures and not self._network.capture_may_fail
        return self.mode == "loop" and is_gpu(rows.device) and known

    def _take_turns(self, tasks: Sequence[Task], job: TrainingJob) -> None:
        """Run the clients' tasks, in as many lanes as memory allows."""
        batch_size, matrices = job.recipe.batch_size, num_matrices(job)
        fit = self.stacks.size(batch_size, job.rows, matrices=matrices)
        device = job.rows.device
        lanes = self._lanes.setdefault(device, Lanes(device))
        with lanes.open(min(LANES, fit, len(tasks))) as opened:
            if not self._trainings:
                # cuDNN benchmarks its kernels, which needs the device for itself.
                take_turns(tasks[:1], opened[:1])
                lanes.settle()
                tasks = tasks[1:]
            take_turns(tasks, opened)

    @torch.no_grad()
    def evaluate(
        self, rows: Tensor, shard: Shard, clients: np.ndarray, wanted: Wanted = NOTHING
    ) -> Score:
        """Score `rows[i]` on the data of the shard's client `clients[i]`.

        One row expanded to many clients (a global model on every client's data) is a
        single stack of one.
        """
        sizes = shard.samples[clients]
        if len(rows) > 1 and rows.stride(0) == 0:
            of_row, _ = self._evaluation(shard, wanted, rows.dtype)
            return _score(of_row.run(rows[:1], clients), sizes)
        sums: Sums = {}
        nothing = partial(OBJECTIVES[shard.task].zeros, len(rows), rows, wanted)
        # As if each sample were a step: the largest clients come first.
        work = work_of(sizes, Length(1, 1))
        # Only determines the size of stacks; each stack chooses its own batches.
        in_flight = self._in_flight(shard)
        samples_each = max(1, in_flight // max(1, len(rows)))
        batch_size = min(int(sizes.max(initial=1)), samples_each)

        def score(members: np.ndarray) -> None:
            # Look it up again after a failure, which frees the old memory.
            of_row, of_stack = self._evaluation(shard, wanted, rows.dtype)
            judge = of_row if len(members) == 1 else of_stack
            if work.in_order and len(members) == len(rows):
                # All clients in their order: nothing needs to be gathered.
                sums.update(judge.run(rows, clients))
                return
            if not sums:
                sums.update(nothing())
            at = on_device(members, rows.device)
            of_members = judge.run(rows[at], clients[members])
            for name, values in of_members.items():
                sums[name][at] = values

        for members in self.stacks.cut(work.order, batch_size, rows):
            ids = shard.clients[clients]
            self.stacks.halving(score, members, ids, "evaluating", free=self.forget)
        return _score(sums or nothing(), sizes)

    def _in_flight(self, shard: Shard) -> int:
        over_halves = self._network.over_halves
        return samples_in_flight(shard, self.cost, over_halves=over_halves)

    def _evaluation(
        self, shard: Shard, wanted: Wanted, dtype: torch.dtype
    ) -> "_Evaluations":
        """Return the memory and the captured steps for such rows on this shard.

        They are kept until too many other kinds have been asked for.
        """
        key = (id(shard), *sorted(wanted.items()), dtype)
        if key not in self._evaluations:
            judged = Judged(
                self._network,
                self._kernel_layout(shard.inputs.device),
                shard,
                wanted,
                dtype,
                self._in_flight(shard),
                # A large network's batches keep the device busy, and captured ones
                # would hold much memory.
                captured=self.mode != "loop",
                lengths=self._lengths,
            )
            # They keep the shard alive, so no other shard can get its id.
            self._evaluations[key] = RowEvaluation(judged), StackEvaluation(judged)
            if len(self._evaluations) > EVALUATIONS:
                self._evaluations.popitem(last=False)
        self._evaluations.move_to_end(key)
        return self._evaluations[key]

    def forget(self) -> None:
        """Free what is kept for another call on the same shards, and the shards."""
        self._trainings.clear()
        self._evaluations.clear()

    def _kernel_layout(self, device: torch.device) -> KernelLayout:
        if device not in self._kernel_layouts:
            self._kernel_layouts[device] = KernelLayout(self.layout, device)
        return self._kernel_layouts[device]

    def _training(self, job: TrainingJob, lane: int = 0) -> StackTraining:
        """Return the memory and the captured steps for such jobs in a lane.

        They are kept as long as clients train on the same shard.
        """
        shard = job.shard
        columns = job.columns
        device = shard.inputs.device
        strengths = None if job.pull is None else job.pull.strengths
        key = (
            id(shard),
            None if columns is None else columns.cpu().numpy().tobytes(),
            strengths,
            job.correction is not None,
            job.gates is not None,
            job.rates is not None,
            job.limits is not None,
            job.recipe.without_rate,  # which may change between rounds
            job.rows.dtype,
            lane,
        )
        if key not in self._trainings:
            # A new shard, for example after a relocation: free the old one's memory.
            for other in list(self._trainings):
                if other[0] != id(shard):
                    del self._trainings[other]
            layout = self._kernel_layout(device)
            trainable = None
            if columns is not None:
                trainable = TrainableColumns(columns, layout, device)
            # It keeps the shard alive, so no other shard can get its id.
            self._trainings[key] = StackTraining(
                self._network,
                layout,
                shard,
                job.recipe,
                trainable,
                strengths,
                corrected=job.correction is not None,
                gated=job.gates is not None,
                rate_each=job.rates is not None,
                limited=job.limits is not None,
                lengths=self._lengths,
                dtype=job.rows.dtype,
            )
        return self._trainings[key]


def _no_losses(job: TrainingJob) -> Losses:
    """Return the losses of a job's clients before they train."""
    return Losses.none(job.rows, texts=job.shard.task == "next-token")


def _score(sums: Sums, sizes: np.ndarray) -> Score:
    """Return a score; count samples if nothing else was counted."""
    if "count" not in sums:
        sums["count"] = on_device(sizes, sums["loss"].device)
    return Score(sums)
