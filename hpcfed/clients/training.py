"""Local training of a stack of clients: SGD steps on a matrix that stays in place, so
that a step can be captured.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hpcfed.clients.capture import Replays
from hpcfed.clients.pull import Pull, PullAtWork, Strengths
from hpcfed.clients.schedule import (
    Length,
    num_epochs,
    num_steps,
    step_shapes,
    training_moves,
    training_samples,
)
from hpcfed.data.shards import Shard
from hpcfed.kernels.batch import cross_entropy, gather_images
from hpcfed.kernels.linear import Update
from hpcfed.kernels.sgd import Rule, descend
from hpcfed.models.layout import Work, Workplace
from hpcfed.models.stack import StackedNetwork
from hpcfed.runtime import randomness
from hpcfed.runtime.device import on_device


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
    steps: int = 0
    """So many in place of epochs; 0: by epochs."""
    augment: bool = False
    """Whether images are shifted and mirrored, anew in every step."""

    @property
    def length(self) -> Length:
        return Length(self.epochs, self.batch_size, self.steps)


class Unfrozen:
    """The part of a row that training may change."""

    def __init__(
        self, columns: Tensor, workplace: Workplace, device: torch.device
    ) -> None:
        mask = columns.to(device, torch.float32).unsqueeze(0)
        parameters, statistics = workplace.new(1, mask)
        workplace.load(mask, (parameters, statistics))
        self.parameters, self.statistics = parameters[0] != 0, statistics[0] != 0
        on_host = columns.cpu()
        names = {
            e.name
            for e in workplace.plain.entries
            if bool(on_host[e.start : e.stop].any())
        }
        self.entries = [e for e in workplace.entries if e.trainable and e.name in names]
        """The tensors that hold such columns; gradients of others are not computed."""


class StackTraining:
    """The memory of a stack of clients at work, and the steps on it; made for one
    shard, one kind of SGD, some columns.

    A stack is loaded into the first rows; its clients are ordered by their number of
    steps, longest first. The rows of a client that has finished may be advanced by
    later steps all the same, because steps are captured for a few sizes of stacks only;
    its result has been put aside by then.
    """

    def __init__(
        self,
        network: StackedNetwork,
        workplace: Workplace,
        shard: Shard,
        sgd: Sgd,
        moving: Unfrozen | None,
        pulled: Strengths | None = None,
        *,
        dtype: torch.dtype,
    ) -> None:
        self._pull = None if pulled is None else PullAtWork(pulled, workplace)
        self._network, self._workplace, self._shard, self._sgd, self._moving = (
            network,
            workplace,
            shard,
            sgd,
            moving,
        )
        self._device = shard.images.device
        self._images = shard.images.permute(
            0, 2, 3, 1
        ).contiguous()  # nothing is copied if they are channels-last
        self._replays = Replays(self._device)
        self._sizes = np.asarray(shard.sizes, np.int64)
        self._sizes_there = on_device(self._sizes, self._device)
        self._epochs = num_epochs(self._sizes, sgd.length)
        self._steps = int(num_steps(self._sizes, sgd.length).max())
        self._slots = min(
            shard.index.shape[1], sgd.batch_size
        )  # the index may be wider than these clients' samples
        self._rule = Rule(sgd.momentum, sgd.weight_decay, sgd.clip)
        self._lr = torch.zeros((), dtype=dtype, device=self._device)
        self._step = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._capacity = 0
        self._aside: tuple[Tensor, ...] = ()

    def run(
        self,
        rows: Tensor,
        trained: Tensor,
        clients: np.ndarray,
        keys: Tensor,
        lr: float,
        pull: Pull | None = None,
    ) -> Tensor:
        """Trains rows of the shard's clients, whose order is by steps, into `trained`;
        returns their mean losses.
        """
        count, sizes = len(rows), self._sizes[clients]
        shapes = step_shapes(sizes, self._sgd.length)
        self._reserve(count)
        work = self._first(count)
        if self._workplace.padded:  # and clients that diverged may have left NaN there
            work[0].zero_()
            self._gradient.zero_()
        self._workplace.load(rows, work)
        if self._pull is not None:
            assert pull is not None, "made for clients that are pulled"
            self._pull.load(pull)
        self._clients[:count].copy_(torch.from_numpy(clients), non_blocking=True)
        self._keys[:count] = keys
        self._lr.fill_(lr)
        self._replays.run(count, partial(self._begin, count))
        active = count
        for shape in shapes:
            if shape.clients < active:
                self._put_aside(slice(shape.clients, active))
                active = shape.clients
            captured = self._captured_shape(*shape)
            self._replays.run(captured, partial(self._advance, *captured))
        if active < count:
            for matrix, aside in zip(self._work, self._aside, strict=True):
                matrix[active:count] = aside[active:count]
        self._workplace.store(work, trained)
        return self._total[:count] / self._counts[:, :count].sum(0)

    def _first(self, clients: int) -> Work:
        parameters, statistics = (matrix[:clients] for matrix in self._work)
        return parameters, statistics

    def _captured_shape(
        self, active: int, slots: int, full: bool
    ) -> tuple[int, int, bool]:
        """Clients, slots and whether all slots are full, rounded up to few different
        shapes on a GPU.

        A stack of one client keeps its exact shape, for which torch's own kernels need
        no mask.
        """
        if self._device.type == "cpu" or self._capacity == 1:
            return active, slots, full
        clients = min(
            self._capacity, _rounded_up(max(active, 2), 8)
        )  # our own kernels serve from two clients on
        wide = min(self._slots, _rounded_up(slots, 1))
        return clients, wide, full and (clients, wide) == (active, slots)

    def _put_aside(self, clients: slice) -> None:
        """Saves the rows of clients that have finished."""
        if not self._aside:
            self._aside = self._workplace.new(self._capacity, self._lr)
        for work, aside in zip(self._work, self._aside, strict=True):
            aside[clients] = work[clients]

    def _reserve(self, clients: int) -> None:
        """Makes the memory large enough; what was captured before is lost when it
        moves.
        """
        if clients <= self._capacity:
            return
        self._capacity = clients
        self._replays.forget()
        self._aside = ()

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        self._work = self._workplace.new(clients, self._lr)
        self._gradient = torch.zeros_like(self._work[0])
        self._velocity = torch.zeros_like(self._work[0]) if self._sgd.momentum else None
        if self._pull is not None:
            self._pull.reserve(clients, self._lr)
        self._total = zeros(clients, dtype=self._lr.dtype)
        self._clients, self._owned, self._keys = (
            zeros(clients),
            zeros(clients),
            zeros(clients),
        )
        self._layer_keys = zeros(self._steps, self._network.random_layers, clients)
        self._samples, self._counts = (
            zeros(self._steps, clients, self._slots),
            zeros(self._steps, clients),
        )
        self._moves = torch.zeros_like(self._samples) if self._sgd.augment else None

    def _begin(self, clients: int) -> None:
        """Draws the order of samples, and starts everything anew."""
        own, keys = self._clients[:clients], self._keys[:clients]
        self._owned[:clients] = self._sizes_there[own]
        self._samples[:, :clients], self._counts[:, :clients] = training_samples(
            self._shard.index[own],
            self._owned[:clients],
            randomness.child_keys(keys, 0),
            self._sgd.length,
            epochs=self._epochs,
            steps=self._steps,
        )
        if self._moves is not None:
            moves = training_moves(
                randomness.child_keys(keys, 2), self._sgd.batch_size, self._steps
            )
            self._moves[:, :clients] = moves[:, :, : self._slots]
        if self._network.random_layers:
            steps = torch.arange(self._steps, device=self._device)[:, None]
            layers = torch.arange(self._network.random_layers, device=self._device)[
                :, None
            ]
            step_keys = randomness.child_keys(randomness.child_keys(keys, 1), steps)
            self._layer_keys[:, :, :clients] = randomness.child_keys(
                step_keys[:, None], layers
            )
        self._total.zero_()
        self._step.zero_()
        if self._velocity is not None:
            self._velocity.zero_()

    def _advance(self, clients: int, slots: int, full: bool) -> None:
        """One step of the first clients."""
        images = gather_images(
            self._images,
            self._samples,
            self._step,
            clients,
            slots,
            moves=self._moves,
            blank=self._shard.blank,
        )
        valid = None
        if self._network.masked and not full:
            count = self._counts.index_select(0, self._step)[0, :clients, None]
            valid = torch.arange(slots, device=self._device) < count
        keys = (
            self._layer_keys.index_select(0, self._step)[0, :, :clients]
            if self._network.random_layers
            else None
        )
        updating = self._differentiate(clients, images, valid, keys)
        if self._pull is not None:
            self._pull.add(self._work[0][:clients], self._gradient[:clients])
        self._descend(clients, updating)
        self._step += 1

    def _differentiate(
        self, clients: int, images: Tensor, valid: Tensor | None, keys: Tensor | None
    ) -> set[str]:
        """Leaves the gradient of each client's mean loss in `_gradient`, and adds its
        summed loss to `_total`.

        Running statistics change where they may. Parameters do not, but for those that
        update themselves: their names.
        """
        gradient = self._gradient[:clients]
        parameters, statistics = self._first(clients)
        moved = statistics if self._moving is None else statistics.clone()
        tensors = {
            name: view.detach()
            for name, view in self._workplace.views(parameters, moved).items()
        }
        updates = self._updates(tensors, len(images) // clients)
        learned = (
            self._moving.entries
            if self._moving
            else [e for e in self._workplace.entries if e.trainable]
        )
        learned = [e for e in learned if e.name not in updates]
        leaves = [tensors[e.name].requires_grad_() for e in learned]
        sinks = {e.name: self._workplace.view(gradient, e) for e in learned}
        logits = self._network(
            tensors,
            images,
            training=True,
            valid=valid,
            keys=keys,
            sinks=sinks,
            updates=updates,
        )
        loss = cross_entropy(
            logits,
            self._shard.labels,
            self._samples,
            self._counts,
            self._step,
            self._total[:clients],
        )
        # A client's loss depends on its own row alone, so one pass gives every client
        # its own gradient.
        try:
            parts = torch.autograd.grad(loss, leaves)
        finally:
            self._network.join()
        elsewhere = [
            (sinks[e.name], part)
            for e, part in zip(learned, parts, strict=True)
            if part.data_ptr() != sinks[e.name].data_ptr()
        ]
        if elsewhere:
            torch._foreach_copy_(
                [sink for sink, _ in elsewhere], [part for _, part in elsewhere]
            )
        if self._moving is not None:
            statistics.copy_(torch.where(self._moving.statistics, moved, statistics))
        return set(updates)

    def _updates(self, tensors: dict[str, Tensor], slots: int) -> dict[str, Update]:
        """Which weights update themselves, and how; none where columns are frozen or
        the gradient is needed first.
        """
        if self._moving is not None or self._rule.clip or self._pull is not None:
            return {}
        names, clients = (
            self._network.updating(tensors, slots),
            len(next(iter(tensors.values()))),
        )
        entries = [e for e in self._workplace.entries if e.name in names]
        velocity = self._velocity
        return {
            e.name: Update(
                None
                if velocity is None
                else self._workplace.view(velocity[:clients], e),
                self._lr,
                self._rule,
            )
            for e in entries
        }

    def _descend(self, clients: int, updated: set[str]) -> None:
        """One step of SGD on the rows in place, but for what has updated itself; frozen
        columns keep their bits.
        """
        matrices = (self._work[0], self._gradient, self._velocity)
        edges = [0]
        for e in self._workplace.entries:
            if e.name in updated:
                edges += [e.start, e.stop]
        edges.append(self._workplace.widths[0])
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            rows, gradient, velocity = (
                None if m is None else m[:clients, start:stop] for m in matrices
            )
            moving = (
                None if self._moving is None else self._moving.parameters[start:stop]
            )
            assert rows is not None and gradient is not None
            descend(rows, gradient, velocity, moving, self._lr, self._rule)


def _rounded_up(number: int, sizes: int) -> int:
    """To one of so many sizes between two powers of two."""
    unit = max(1, 2 ** (number - 1).bit_length() // 2 // sizes)
    return -(-number // unit) * unit
