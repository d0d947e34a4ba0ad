"""The engine advances the rows of many clients together, or one after the other when told to.

Both ways are the same program over stacks of clients: all at once, or stacks of one ("loop"), which run torch's own
kernels and serve networks that fill the device alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcfed import streams
from hpcfed.clients.schedule import Schedule, evaluation_schedule, training_schedule
from hpcfed.data.shards import Shard
from hpcfed.models.layout import Entry, Layout
from hpcfed.models.stack import StackedNetwork

LOOP_ABOVE_COLUMNS = 1_000_000
"""`auto` trains larger networks one client at a time: one client's batch of them fills a device by itself."""
EVALUATION_SAMPLES = 4096
"""Samples in flight during evaluation, over all clients of a stack."""


@dataclass(frozen=True)
class Sgd:
    """One client's local training."""

    epochs: int
    batch_size: int
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0
    """Largest norm of a client's gradient; 0: no limit."""


@dataclass(frozen=True)
class Score:
    """Per client: correct answers and summed loss over its samples, on the device, and the number of samples."""

    correct: Tensor
    loss: Tensor
    count: np.ndarray


class Engine:
    def __init__(
        self, network: nn.Module, layout: Layout, *, mode: Literal["auto", "batched", "loop"] = "auto"
    ) -> None:
        self.layout = layout
        self.mode = mode
        if mode == "auto":
            self.mode = "loop" if layout.num_columns > LOOP_ABOVE_COLUMNS else "batched"
        self._network = StackedNetwork(network)

    def train(
        self, rows: Tensor, shard: Shard, clients: np.ndarray, sgd: Sgd, *, keys: Tensor, columns: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Trains `rows[i]` on the data of the shard's client `clients[i]`; a client without data stays as it is.

        `keys` seed each client's order of samples and dropout. `columns` is True where training may change a row; all
        others stay bit-identical. Returns new rows, and the mean training loss per client (NaN without data).
        """
        sizes = np.asarray(shard.sizes, np.int64)[clients]
        positions = torch.from_numpy(clients).to(rows.device)
        order_keys, step_keys = streams.child_keys(keys, 0), streams.child_keys(keys, 1)
        schedule = training_schedule(
            shard.index[positions], sizes, order_keys, epochs=sgd.epochs, batch_size=sgd.batch_size
        )
        moving = None if columns is None else _Moving.of(columns, self.layout, rows.device)
        rows = rows.clone(memory_format=torch.contiguous_format)
        losses = torch.full((len(rows),), torch.nan, dtype=rows.dtype, device=rows.device)
        for stack in self._stacks(schedule):
            members = schedule.order[stack]
            at = torch.from_numpy(members).to(rows.device)
            with _naming(shard.clients[clients[members]], "training"):
                work = rows[at]
                losses[at] = self._train_stack(work, shard, schedule, stack, sgd, step_keys[at], moving)
                rows[at] = work
        return rows, losses

    def _train_stack(
        self,
        rows: Tensor,
        shard: Shard,
        schedule: Schedule,
        stack: slice,
        sgd: Sgd,
        keys: Tensor,
        moving: "_Moving | None",
    ) -> Tensor:
        samples, counts = schedule.samples[stack], schedule.counts_on_device[stack]
        velocity = torch.zeros_like(rows[:, : self.layout.num_parameters]) if sgd.momentum else None
        total = rows.new_zeros(len(rows))
        for step in range(schedule.counts.shape[1]):
            active, slots, full = schedule.shape(step, stack)
            if not active:
                break
            batch = samples[:active, step, :slots]
            valid = None if full else torch.arange(slots, device=rows.device) < counts[:active, step, None]
            loss, gradient = self._gradient(
                rows[:active],
                shard.images[batch.flatten()],
                shard.labels[batch],
                valid=valid,
                keys=streams.child_keys(keys[:active], step),
                moving=moving,
            )
            total[:active] += loss
            _descend(
                rows[:active, : self.layout.num_parameters],
                gradient,
                sgd,
                velocity=None if velocity is None else velocity[:active],
                moving=moving,
            )
        return total / counts.sum(1)

    def _gradient(
        self,
        rows: Tensor,
        images: Tensor,
        labels: Tensor,
        *,
        valid: Tensor | None,
        keys: Tensor,
        moving: "_Moving | None",
    ) -> tuple[Tensor, Tensor]:
        """Each client's summed loss, and the gradient of its mean loss as rows [clients, parameters].

        Of `rows` only running statistics change, where they may.
        """
        # Batch norm moves its statistics in place, but autograd insists that the weights' storage stays as it was.
        statistics = rows[:, self.layout.num_parameters :].clone()
        tensors = {name: view.detach() for name, view in self.layout.views(rows, statistics).items()}
        learned = moving.entries if moving else [e for e in self.layout.entries if e.trainable]
        leaves = [tensors[e.name].requires_grad_() for e in learned]
        logits = self._network(tensors, images, training=True, valid=valid, keys=keys)
        losses = F.cross_entropy(logits, labels.flatten(), reduction="none").view_as(labels)
        if valid is None:
            summed, mean = losses.sum(1), losses.mean(1)
        else:
            losses = losses * valid
            summed = losses.sum(1)
            mean = summed / valid.sum(1)
        # A client's loss depends on its own row alone, so the gradient of the sum is every client's own gradient.
        parts = torch.autograd.grad(mean.sum(), leaves)
        before = rows[:, self.layout.num_parameters :]
        before.copy_(statistics if moving is None else torch.where(moving.statistics, statistics, before))
        if moving is None:
            return summed.detach(), torch.cat([part.flatten(1) for part in parts], 1)
        gradient = rows.new_zeros(len(rows), self.layout.num_parameters)
        for e, part in zip(learned, parts, strict=True):
            gradient[:, e.start : e.stop] = part.flatten(1)
        return summed.detach(), gradient

    @torch.no_grad()
    def evaluate(self, rows: Tensor, shard: Shard, clients: np.ndarray) -> Score:
        """Scores `rows[i]` on the data of the shard's client `clients[i]`.

        Rows that are one row expanded (a global model on every client's data) pass as a single stack of one.
        """
        sizes = np.asarray(shard.sizes, np.int64)[clients]
        index = shard.index[torch.from_numpy(clients).to(rows.device)]
        if len(rows) > 1 and rows.stride(0) == 0:
            return self._evaluate_one(rows[:1], shard, index, sizes)
        correct = torch.zeros(len(rows), dtype=rows.dtype, device=rows.device)
        loss = torch.zeros_like(correct)
        longest = int(sizes.max(initial=0))
        stacked = 1 if self.mode == "loop" else max(1, len(rows))
        schedule = evaluation_schedule(index, sizes, batch_size=max(1, min(longest, -(-EVALUATION_SAMPLES // stacked))))
        for stack in self._stacks(schedule):
            members = schedule.order[stack]
            at = torch.from_numpy(members).to(rows.device)
            with _naming(shard.clients[clients[members]], "evaluating"):
                hits, losses = self._evaluate_stack(rows[at], shard, schedule, stack)
            correct[at], loss[at] = hits, losses
        return Score(correct, loss, sizes)

    def _evaluate_stack(self, rows: Tensor, shard: Shard, schedule: Schedule, stack: slice) -> tuple[Tensor, Tensor]:
        correct, loss = rows.new_zeros(len(rows)), rows.new_zeros(len(rows))
        samples, counts = schedule.samples[stack], schedule.counts_on_device[stack]
        for step in range(schedule.counts.shape[1]):
            active, slots, _ = schedule.shape(step, stack)
            if not active:
                break
            batch = samples[:active, step, :slots]
            valid = torch.arange(slots, device=rows.device) < counts[:active, step, None]
            hits, losses = self._answers(rows[:active], shard.images[batch.flatten()], shard.labels[batch].flatten())
            correct[:active] += (hits.view_as(batch) * valid).sum(1)
            loss[:active] += (losses.view_as(batch) * valid).sum(1)
        return correct, loss

    def _evaluate_one(self, row: Tensor, shard: Shard, index: Tensor, sizes: np.ndarray) -> Score:
        correct = row.new_zeros(len(sizes))
        loss = row.new_zeros(len(sizes))
        owner = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)).to(row.device)
        slot = torch.from_numpy(np.concatenate([np.arange(n) for n in sizes])).to(row.device)
        for owners, slots in zip(owner.split(EVALUATION_SAMPLES), slot.split(EVALUATION_SAMPLES), strict=True):
            samples = index[owners, slots]
            hits, losses = self._answers(row, shard.images[samples], shard.labels[samples])
            correct.index_add_(0, owners, hits.to(row.dtype))
            loss.index_add_(0, owners, losses)
        return Score(correct, loss, sizes)

    def _answers(self, rows: Tensor, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self._network(self.layout.views(rows), images)
        return logits.argmax(1) == labels, F.cross_entropy(logits, labels, reduction="none")

    def _stacks(self, schedule: Schedule) -> Iterator[slice]:
        """The ordered clients, cut into stacks that are advanced together."""
        total = len(schedule.order)
        size = 1 if self.mode == "loop" else max(1, total)
        return (slice(start, min(start + size, total)) for start in range(0, total, size))


@dataclass(frozen=True)
class _Moving:
    """The part of a row that training may change."""

    parameters: Tensor
    """[parameters] True where a column may move."""
    statistics: Tensor
    """[statistics] The same for the columns after the parameters."""
    entries: list[Entry]
    """The tensors that hold such columns; gradients of others are not computed."""

    @classmethod
    def of(cls, columns: Tensor, layout: Layout, device: torch.device) -> "_Moving":
        on_host, on_device = columns.cpu(), columns.to(device)
        entries = [e for e in layout.entries if e.trainable and bool(on_host[e.start : e.stop].any())]
        return cls(on_device[: layout.num_parameters], on_device[layout.num_parameters :], entries)


def _descend(rows: Tensor, gradient: Tensor, sgd: Sgd, *, velocity: Tensor | None, moving: _Moving | None) -> None:
    """One step of SGD on every row in place; columns that may not move keep their bits."""
    if moving is not None:
        gradient = gradient * moving.parameters
    if sgd.clip:
        norm = gradient.norm(dim=1, keepdim=True)
        gradient = gradient * (sgd.clip / (norm + 1e-6)).clamp(max=1.0)
    if sgd.weight_decay:
        gradient = gradient.add(rows, alpha=sgd.weight_decay)
    if velocity is not None:
        gradient = velocity.mul_(sgd.momentum).add_(gradient)
    if moving is None:
        rows.sub_(gradient, alpha=sgd.lr)
    else:
        rows.copy_(torch.where(moving.parameters, rows - sgd.lr * gradient, rows))


@contextmanager
def _naming(clients: np.ndarray, doing: str) -> Iterator[None]:
    """Adds to an exception which clients were in work."""
    try:
        yield
    except Exception as error:
        named = ", ".join(str(c) for c in clients[:8]) + (", …" if len(clients) > 8 else "")
        error.add_note(f"while {doing} client{'s' if len(clients) > 1 else ''} {named}")
        raise
