"""The engine advances the rows of many clients together, or one after the other when
that is quicker.

Both ways are the same program over stacks of clients: as many as memory allows, or
stacks of one ("loop"), which run torch's own kernels and serve networks that fill the
device alone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcfed.clients.fisher import Fisher
from hpcfed.clients.pull import Pull
from hpcfed.clients.schedule import (
    Length,
    evaluation_samples,
    longest_first,
    num_steps,
    step_shapes,
)
from hpcfed.clients.training import Sgd, StackTraining, Unfrozen
from hpcfed.data.shards import Shard
from hpcfed.errors import remark
from hpcfed.models.cost import Cost, cost
from hpcfed.models.layout import Layout, Workplace
from hpcfed.models.stack import StackedNetwork
from hpcfed.runtime.device import on_device

__all__ = ["Engine", "Score", "Sgd"]

LOOP_ABOVE_COLUMNS = 4_000_000
"""`auto` trains larger networks one client at a time: one client's batch of them fills
a device by itself.
"""
EVALUATION_SAMPLES = 4096
"""Samples in flight during evaluation, over all clients of a stack."""
MOST_CLIENTS = 65_535
"""Of a stack: a kernel has a block for each in the grid's second direction, which goes
no further.
"""
MEMORY_SHARE = 0.6
"""Of the device's free memory, for the rows and activations of a stack."""
CPU_ACTIVATIONS = 2**24
"""Floats of activations of a stack on a CPU; larger stacks gain nothing there."""


@dataclass(frozen=True)
class Score:
    """Per client: correct answers and summed loss over its samples, on the device, and
    the number of samples.
    """

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
        bf16: bool = False,
    ) -> None:
        """`shape` is that of an image.

        `bf16` lets a client that is alone in its stack compute in bfloat16 on a GPU;
        its row stays as it is.
        """
        self.layout = layout
        self._network = StackedNetwork(network, bf16=bf16)
        self.cost: Cost = cost(network, shape)
        """Of one sample."""
        self.mode = mode
        if mode == "auto":
            self.mode = "loop" if layout.num_columns > LOOP_ABOVE_COLUMNS else "batched"
        self.fisher = Fisher(network, layout, self.cost)
        """Diagonals of the Fisher information of rows."""
        self._workplaces: dict[torch.device, Workplace] = {}
        self._fitting: dict[tuple[int, bool], int] = {}
        """Clients that fit into free memory, by the size of batches and whether they
        are pulled; asked once, because asking takes time.
        """
        self._trainings: dict[tuple[object, ...], StackTraining] = {}
        self._most = 0
        """Clients of a stack, since larger ones have found no memory; 0: that has not
        happened.
        """
        self.halvings = 0
        """How often it has."""

    def train(
        self,
        rows: Tensor,
        shard: Shard,
        clients: np.ndarray,
        sgd: Sgd,
        *,
        keys: Tensor,
        columns: Tensor | None = None,
        pull: Pull | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Trains `rows[i]` on the data of the shard's client `clients[i]`; a client
        without data stays as it is.

        `keys` seed each client's order of samples and dropout. `columns` is True where
        training may change a row; all others stay bit-identical. `pull` draws row i to
        its reference i. Returns new rows, and the mean cross-entropy in training per
        client (NaN without data).
        """
        sizes = np.asarray(shard.sizes, np.int64)[clients]
        order = longest_first(num_steps(sizes, sgd.length))
        trained = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        losses = torch.full(
            (len(rows),), torch.nan, dtype=rows.dtype, device=rows.device
        )
        if len(order) < len(rows):
            idle = on_device(np.flatnonzero(sizes == 0), rows.device)
            trained[idle] = rows[idle]

        def advance(members: np.ndarray) -> None:
            training = self._training(shard, sgd, columns, pull, rows.dtype)
            if np.array_equal(
                members, np.arange(len(rows))
            ):  # as it is when all clients have equally much to do
                losses.copy_(training.run(rows, trained, clients, keys, sgd.lr, pull))
                return
            at = on_device(members, rows.device)
            own = torch.empty(
                len(members), rows.shape[1], dtype=rows.dtype, device=rows.device
            )
            pulled = None if pull is None else pull.of(at)
            losses[at] = training.run(
                rows[at], own, clients[members], keys[at], sgd.lr, pulled
            )
            trained[at] = own

        for members in self._stacks(
            order, sgd.batch_size, rows, pulled=pull is not None
        ):
            self._halving(advance, members, shard.clients[clients], "training")
        return trained, losses

    def _halving(
        self,
        work: Callable[[np.ndarray], None],
        members: np.ndarray,
        named: np.ndarray,
        doing: str,
    ) -> None:
        """Work on a stack; where memory does not suffice, half as many clients at a
        time from then on.

        Memory and captured steps of the larger stack are given back first.
        """
        if self._most and len(members) > self._most:
            for part in np.array_split(members, -(-len(members) // self._most)):
                self._halving(work, part, named, doing)
            return
        try:
            with _naming(named[members], doing):
                work(members)
            return
        except torch.OutOfMemoryError as error:
            if len(members) == 1:
                error.add_note(
                    "not even one client finds memory: smaller batches or a smaller "
                    "network need less"
                )
                raise
        # Here, because the exception keeps alive whatever the failed work had in its
        # hands.
        self._most = len(members) // 2
        self.halvings += 1
        self.forget()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        line = f"hpcfed: out of memory {doing} {len(members)} clients at a time; going on with {self._most}"
        remark(line)
        self._halving(work, members, named, doing)

    def forget(self) -> None:
        """Gives back what it keeps for training on the same shards again, and with it
        the shards.
        """
        self._trainings.clear()

    def _training(
        self,
        shard: Shard,
        sgd: Sgd,
        columns: Tensor | None,
        pull: Pull | None,
        dtype: torch.dtype,
    ) -> StackTraining:
        """The memory and the captured steps for such work; kept for as long as clients
        train on the same shard.
        """
        device = shard.images.device
        frozen = None if columns is None else columns.cpu().numpy().tobytes()
        strengths = None if pull is None else pull.strengths
        key = (
            id(shard),
            frozen,
            strengths,
            replace(sgd, lr=0.0),
            dtype,
        )  # the learning rate may change between rounds
        if key not in self._trainings:
            self._trainings = {
                k: kept for k, kept in self._trainings.items() if k[0] == id(shard)
            }
            workplace = self._workplace(device)
            moving = None if columns is None else Unfrozen(columns, workplace, device)
            training = StackTraining(
                self._network, workplace, shard, sgd, moving, strengths, dtype=dtype
            )
            self._trainings[key] = (
                training  # which keeps the shard, so no other can have its id
            )
        return self._trainings[key]

    def _workplace(self, device: torch.device) -> Workplace:
        if device not in self._workplaces:
            self._workplaces[device] = Workplace(self.layout, device)
        return self._workplaces[device]

    @torch.no_grad()
    def evaluate(self, rows: Tensor, shard: Shard, clients: np.ndarray) -> Score:
        """Scores `rows[i]` on the data of the shard's client `clients[i]`.

        Rows that are one row expanded (a global model on every client's data) pass as a
        single stack of one.
        """
        sizes = np.asarray(shard.sizes, np.int64)[clients]
        index = shard.index[on_device(clients, rows.device)]
        if len(rows) > 1 and rows.stride(0) == 0:
            return self._evaluate_one(rows[:1], shard, index, sizes)
        correct = torch.zeros(len(rows), dtype=rows.dtype, device=rows.device)
        loss = torch.zeros_like(correct)
        order = longest_first(sizes)
        most = min(
            int(sizes.max(initial=1)), max(1, EVALUATION_SAMPLES // max(1, len(rows)))
        )

        def judge(members: np.ndarray) -> None:
            at = on_device(members, rows.device)
            correct[at], loss[at] = self._evaluate_stack(
                rows[at], shard, index[at], sizes[members]
            )

        for members in self._stacks(order, most, rows):
            self._halving(judge, members, shard.clients[clients], "evaluating")
        return Score(correct, loss, sizes)

    def _evaluate_stack(
        self, rows: Tensor, shard: Shard, index: Tensor, sizes: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        batch_size = min(int(sizes.max()), -(-EVALUATION_SAMPLES // len(rows)))
        shapes = step_shapes(sizes, Length(1, batch_size))
        owned = on_device(sizes, rows.device)
        samples, counts = evaluation_samples(
            index, owned, batch_size=batch_size, steps=len(shapes)
        )
        tensors = self._tensors(rows)
        correct, loss = rows.new_zeros(len(rows)), rows.new_zeros(len(rows))
        for step, (active, slots, _) in enumerate(shapes):
            batch = samples[step, :active, :slots]
            valid = (
                torch.arange(slots, device=rows.device) < counts[step, :active, None]
            )
            own = {name: tensor[:active] for name, tensor in tensors.items()}
            hits, losses = self._answers(
                own, shard.images[batch.flatten()], shard.labels[batch].flatten()
            )
            correct[:active] += (hits.view_as(batch) * valid).sum(1)
            loss[:active] += (losses.view_as(batch) * valid).sum(1)
        return correct, loss

    def _evaluate_one(
        self, row: Tensor, shard: Shard, index: Tensor, sizes: np.ndarray
    ) -> Score:
        correct = row.new_zeros(len(sizes))
        loss = row.new_zeros(len(sizes))
        tensors = self._tensors(row)
        owner = on_device(np.repeat(np.arange(len(sizes)), sizes), row.device)
        slot = on_device(np.concatenate([np.arange(n) for n in sizes]), row.device)
        for owners, slots in zip(
            owner.split(EVALUATION_SAMPLES), slot.split(EVALUATION_SAMPLES), strict=True
        ):
            samples = index[owners, slots]
            hits, losses = self._answers(
                tensors, shard.images[samples], shard.labels[samples]
            )
            correct.index_add_(0, owners, hits.to(row.dtype))
            loss.index_add_(0, owners, losses)
        return Score(correct, loss, sizes)

    def _tensors(self, rows: Tensor) -> dict[str, Tensor]:
        workplace = self._workplace(rows.device)
        work = workplace.new(len(rows), rows)
        workplace.load(rows, work)
        return workplace.views(*work)

    def _answers(
        self, tensors: dict[str, Tensor], images: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        logits = self._network(tensors, images)
        return logits.argmax(1) == labels, F.cross_entropy(
            logits, labels, reduction="none"
        )

    def _stacks(
        self, order: np.ndarray, batch_size: int, rows: Tensor, *, pulled: bool = False
    ) -> Iterator[np.ndarray]:
        """The ordered clients, cut into stacks that are advanced together."""
        size = (
            self._stack_size(batch_size, rows, pulled=pulled)
            if self.mode == "batched"
            else 1
        )
        size = min(size, self._most or size, MOST_CLIENTS)
        count = -(-len(order) // size)
        return (
            (np.asarray(part) for part in np.array_split(order, count))
            if count
            else iter(())
        )

    def _stack_size(
        self, batch_size: int, rows: Tensor, *, pulled: bool = False
    ) -> int:
        """As many clients as fit into free memory on a GPU; on a CPU as many as pay."""
        if rows.device.type == "cpu":
            return max(1, CPU_ACTIVATIONS // (batch_size * self.cost.activations))
        if (batch_size, pulled) not in self._fitting:
            free, _ = torch.cuda.mem_get_info(rows.device)
            # rows at work, gradient, momentum, rows put aside; references, masks and
            # what lies between; activations and their gradients
            matrices = 10 if pulled else 6
            floats = (
                matrices * self.layout.num_columns
                + 3 * batch_size * self.cost.activations
            )
            self._fitting[batch_size, pulled] = max(
                1, int(MEMORY_SHARE * free / (floats * rows.element_size()))
            )
        return self._fitting[batch_size, pulled]


@contextmanager
def _naming(clients: np.ndarray, doing: str) -> Iterator[None]:
    """Adds to an exception which clients were in work."""
    try:
        yield
    except Exception as error:
        named = ", ".join(str(c) for c in clients[:8]) + (
            ", …" if len(clients) > 8 else ""
        )
        error.add_note(f"while {doing} client{'s' if len(clients) > 1 else ''} {named}")
        raise
