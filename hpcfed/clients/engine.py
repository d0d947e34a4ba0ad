"""The engine advances the rows of many clients together, or one after the other when that is quicker.

Both ways are the same program over stacks of clients: as many as memory allows, or stacks of one ("loop"), which run
torch's own kernels and serve networks that fill the device alone.
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
from hpcfed.clients.schedule import Schedule, evaluation_schedule, num_steps, training_schedule
from hpcfed.clients.training import Moving, Sgd, StackTraining
from hpcfed.data.shards import Shard
from hpcfed.models.cost import Cost, cost
from hpcfed.models.layout import Layout, Workplace
from hpcfed.models.stack import StackedNetwork

__all__ = ["Engine", "Score", "Sgd"]

LOOP_ABOVE = 10e9
"""`auto` trains clients one at a time when a step of one client has more multiply-adds: it fills a GPU by itself."""
EVALUATION_SAMPLES = 4096
"""Samples in flight during evaluation, over all clients of a stack."""
MEMORY_SHARE = 0.6
"""Of the device's free memory, for the rows and activations of a stack."""
CPU_ACTIVATIONS = 2**21
"""Floats of activations of a stack on a CPU, where a stack should fit into the caches."""


@dataclass(frozen=True)
class Score:
    """Per client: correct answers and summed loss over its samples, on the device, and the number of samples."""

    correct: Tensor
    loss: Tensor
    count: np.ndarray


class Engine:
    def __init__(
        self,
        network: nn.Module,
        layout: Layout,
        *,
        shape: tuple[int, int, int],
        mode: Literal["auto", "batched", "loop"] = "auto",
        batch_size: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        """`shape` is that of an image; `auto` chooses by the size of batches and the device."""
        self.layout = layout
        self._network = StackedNetwork(network)
        self.cost: Cost = cost(network, shape)
        """Of one sample."""
        self.mode = mode
        if mode == "auto":
            alone = torch.device(device).type == "cuda" and batch_size * self.cost.training > LOOP_ABOVE
            self.mode = "loop" if alone else "batched"
        self._workplaces: dict[torch.device, Workplace] = {}
        self._trainings: dict[tuple[object, ...], tuple[tuple[object, ...], StackTraining]] = {}

    def train(
        self, rows: Tensor, shard: Shard, clients: np.ndarray, sgd: Sgd, *, keys: Tensor, columns: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Trains `rows[i]` on the data of the shard's client `clients[i]`; a client without data stays as it is.

        `keys` seed each client's order of samples and dropout. `columns` is True where training may change a row; all
        others stay bit-identical. Returns new rows, and the mean training loss per client (NaN without data).
        """
        sizes = np.asarray(shard.sizes, np.int64)[clients]
        steps = num_steps(sizes, epochs=sgd.epochs, batch_size=sgd.batch_size)
        order = np.argsort(-steps, kind="stable")
        order = order[steps[order] > 0]
        training = self._training(shard, sgd, columns, rows.dtype)
        trained = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        losses = torch.full((len(rows),), torch.nan, dtype=rows.dtype, device=rows.device)
        idle = torch.from_numpy(np.flatnonzero(steps == 0)).to(rows.device)
        trained[idle] = rows[idle]
        for members in self._stacks(order, sgd.batch_size, rows):
            at = torch.from_numpy(members).to(rows.device)
            with _naming(shard.clients[clients[members]], "training"):
                index = shard.index[torch.from_numpy(clients[members]).to(rows.device)]
                order_keys, step_keys = (streams.child_keys(keys[at], number) for number in (0, 1))
                schedule = training_schedule(
                    index, sizes[members], order_keys, epochs=sgd.epochs, batch_size=sgd.batch_size
                )
                work = rows[at]
                summed = training.run(work, schedule, step_keys, sgd.lr)
                losses[at] = summed / torch.from_numpy(sizes[members] * sgd.epochs).to(rows)
                trained[at] = work
        return trained, losses

    def _training(self, shard: Shard, sgd: Sgd, columns: Tensor | None, dtype: torch.dtype) -> StackTraining:
        """The memory and the captured steps for such work; kept, because rounds are alike."""
        device = shard.images.device
        kind = (sgd.epochs, sgd.batch_size, sgd.momentum, sgd.weight_decay, sgd.clip)
        key = (id(shard), None if columns is None else id(columns), kind, dtype)
        if key not in self._trainings:
            workplace = self._workplace(device)
            moving = None if columns is None else Moving(columns, workplace, device)
            training = StackTraining(self._network, workplace, shard, sgd, moving, dtype=dtype)
            self._trainings[key] = ((shard, columns), training)  # what is kept alive cannot lend its id to another
        return self._trainings[key][1]

    def _workplace(self, device: torch.device) -> Workplace:
        if device not in self._workplaces:
            self._workplaces[device] = Workplace(self.layout, device)
        return self._workplaces[device]

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
        order = np.argsort(-sizes, kind="stable")
        order = order[sizes[order] > 0]
        batch = min(int(sizes.max(initial=1)), max(1, EVALUATION_SAMPLES // max(1, len(rows))))
        for members in self._stacks(order, batch, rows):
            at = torch.from_numpy(members).to(rows.device)
            size = min(int(sizes[members].max()), -(-EVALUATION_SAMPLES // len(members)))
            with _naming(shard.clients[clients[members]], "evaluating"):
                schedule = evaluation_schedule(index[at], sizes[members], batch_size=size)
                correct[at], loss[at] = self._evaluate_stack(self._tensors(rows[at]), shard, schedule)
        return Score(correct, loss, sizes)

    def _evaluate_stack(self, tensors: dict[str, Tensor], shard: Shard, schedule: Schedule) -> tuple[Tensor, Tensor]:
        hits_of, losses_of = [], []
        for step in range(len(schedule.counts)):
            active, slots, _ = schedule.shape(step)
            batch = schedule.samples[step, :active, :slots]
            valid = torch.arange(slots, device=batch.device) < schedule.counts_on_device[step, :active, None]
            own = {name: tensor[:active] for name, tensor in tensors.items()}
            hits, losses = self._answers(own, shard.images[batch.flatten()], shard.labels[batch].flatten())
            hits_of.append(F.pad((hits.view_as(batch) * valid).sum(1), (0, len(schedule.order) - active)))
            losses_of.append(F.pad((losses.view_as(batch) * valid).sum(1), (0, len(schedule.order) - active)))
        return torch.stack(hits_of).sum(0).to(losses_of[0]), torch.stack(losses_of).sum(0)

    def _evaluate_one(self, row: Tensor, shard: Shard, index: Tensor, sizes: np.ndarray) -> Score:
        correct = row.new_zeros(len(sizes))
        loss = row.new_zeros(len(sizes))
        tensors = self._tensors(row)
        owner = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)).to(row.device)
        slot = torch.from_numpy(np.concatenate([np.arange(n) for n in sizes])).to(row.device)
        for owners, slots in zip(owner.split(EVALUATION_SAMPLES), slot.split(EVALUATION_SAMPLES), strict=True):
            samples = index[owners, slots]
            hits, losses = self._answers(tensors, shard.images[samples], shard.labels[samples])
            correct.index_add_(0, owners, hits.to(row.dtype))
            loss.index_add_(0, owners, losses)
        return Score(correct, loss, sizes)

    def _tensors(self, rows: Tensor) -> dict[str, Tensor]:
        workplace = self._workplace(rows.device)
        work = workplace.new(len(rows), rows)
        workplace.load(rows, work)
        return workplace.views(*work)

    def _answers(self, tensors: dict[str, Tensor], images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self._network(tensors, images)
        return logits.argmax(1) == labels, F.cross_entropy(logits, labels, reduction="none")

    def _stacks(self, order: np.ndarray, batch_size: int, rows: Tensor) -> Iterator[np.ndarray]:
        """The ordered clients, cut into stacks that are advanced together."""
        size = self._stack_size(batch_size, rows) if self.mode == "batched" else 1
        count = -(-len(order) // size)
        return (np.asarray(part) for part in np.array_split(order, count)) if count else iter(())

    def _stack_size(self, batch_size: int, rows: Tensor) -> int:
        """As many clients as fit: into free memory on a GPU, into the caches on a CPU."""
        if rows.device.type == "cpu":
            return max(1, CPU_ACTIVATIONS // (batch_size * self.cost.activations))
        free, _ = torch.cuda.mem_get_info(rows.device)
        free += torch.cuda.memory_reserved(rows.device) - torch.cuda.memory_allocated(rows.device)
        # rows at work, gradient, momentum, rows put aside; activations and their gradients
        floats = 6 * self.layout.num_columns + 3 * batch_size * self.cost.activations
        return max(1, int(MEMORY_SHARE * free / (floats * rows.element_size())))


@contextmanager
def _naming(clients: np.ndarray, doing: str) -> Iterator[None]:
    """Adds to an exception which clients were in work."""
    try:
        yield
    except Exception as error:
        named = ", ".join(str(c) for c in clients[:8]) + (", …" if len(clients) > 8 else "")
        error.add_note(f"while {doing} client{'s' if len(clients) > 1 else ''} {named}")
        raise
