"""Local training of a stack of clients: SGD steps on a matrix that stays in place, so that a step can be captured."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcfed import streams
from hpcfed.clients.capture import Replays
from hpcfed.clients.schedule import Schedule
from hpcfed.data.shards import Shard
from hpcfed.models.layout import Workplace
from hpcfed.models.stack import StackedNetwork


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


class Moving:
    """The part of a row that training may change."""

    def __init__(self, columns: Tensor, workplace: Workplace, device: torch.device) -> None:
        mask = columns.to(device, torch.float32).unsqueeze(0)
        parameters, statistics = workplace.new(1, mask)
        workplace.load(mask, (parameters, statistics))
        self.parameters, self.statistics = parameters[0] != 0, statistics[0] != 0
        on_host = columns.cpu()
        names = {e.name for e in workplace.plain.entries if bool(on_host[e.start : e.stop].any())}
        self.entries = [e for e in workplace.entries if e.trainable and e.name in names]
        """The tensors that hold such columns; gradients of others are not computed."""


class StackTraining:
    """The memory of a stack of clients at work, and the steps on it; made for one shard, one kind of SGD, some columns.

    A stack is loaded into the first rows; its clients are ordered by their number of steps, longest first. The rows of
    a client that has finished may be advanced by later steps all the same, because steps are captured for a few sizes
    of stacks only; its result has been put aside by then.
    """

    def __init__(
        self,
        network: StackedNetwork,
        workplace: Workplace,
        shard: Shard,
        sgd: Sgd,
        moving: Moving | None,
        *,
        dtype: torch.dtype,
    ) -> None:
        self._network, self._workplace, self._shard, self._sgd, self._moving = network, workplace, shard, sgd, moving
        self._device, self._dtype = shard.images.device, dtype
        self._images = shard.images.permute(0, 2, 3, 1).contiguous()  # nothing is copied if they are channels-last
        self._replays = Replays(self._device)
        self._lr = torch.zeros((), dtype=dtype, device=self._device)
        self._step = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._clients = self._steps = self._slots = 0
        self._aside: tuple[Tensor, ...] = ()

    def run(self, rows: Tensor, schedule: Schedule, keys: Tensor, lr: float) -> Tensor:
        """Advances rows [clients, columns], in the schedule's order, in place; returns summed losses per client."""
        clients, (steps, _, slots) = len(rows), schedule.samples.shape
        self._reserve(clients, steps, slots)
        total = self._total[:clients]
        parameters, statistics = (matrix[:clients] for matrix in self._work)
        self._workplace.load(rows, (parameters, statistics))
        self._samples[:steps, :clients, :slots] = schedule.samples
        self._counts[:steps, :clients] = schedule.counts_on_device
        self._keys[:clients] = keys
        self._lr.fill_(lr)
        self._step.zero_()
        total.zero_()
        if self._velocity is not None:
            self._velocity[:clients].zero_()
        finished = clients
        for step in range(steps):
            active, slots, full = schedule.shape(step)
            if active < finished:
                self._put_aside(slice(active, finished))
                finished = active
            shape = self._captured_shape(active, slots, full)
            self._replays.run(shape, partial(self._advance, *shape))
        if finished < clients:
            for work, aside in zip(self._work, self._aside, strict=True):
                work[finished:clients] = aside[finished:clients]
        self._workplace.store((parameters, statistics), rows)
        return total.clone()

    def _captured_shape(self, active: int, slots: int, full: bool) -> tuple[int, int, bool]:
        """Clients, slots and whether all slots are full, rounded up to few different shapes on a GPU.

        A stack of one client keeps its exact shape, for which torch's own kernels need no mask.
        """
        if self._device.type == "cpu" or self._clients == 1:
            return active, slots, full
        clients = min(self._clients, _rounded_up(active, 8))
        wide = min(self._slots, _rounded_up(slots, 1))
        return clients, wide, full and (clients, wide) == (active, slots)

    def _put_aside(self, clients: slice) -> None:
        """Saves the rows of clients that have finished."""
        if not self._aside:
            self._aside = self._workplace.new(self._clients, self._lr)
        for work, aside in zip(self._work, self._aside, strict=True):
            aside[clients] = work[clients]

    def _reserve(self, clients: int, steps: int, slots: int) -> None:
        """Makes the memory large enough; what was captured before is lost when it moves."""
        if clients <= self._clients and steps <= self._steps and slots <= self._slots:
            return
        longest = max(self._shard.sizes)
        self._clients = max(clients, self._clients)
        self._steps = max(steps, self._sgd.epochs * -(-longest // self._sgd.batch_size))
        self._slots = max(slots, min(longest, self._sgd.batch_size))
        self._replays.forget()
        self._aside = ()

        def zeros(*shape: int, dtype: torch.dtype = self._dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        self._work = self._workplace.new(self._clients, self._lr)
        self._gradient = torch.zeros_like(self._work[0])
        self._velocity = torch.zeros_like(self._work[0]) if self._sgd.momentum else None
        self._total = zeros(self._clients)
        self._samples = zeros(self._steps, self._clients, self._slots, dtype=torch.int64)
        self._counts = zeros(self._steps, self._clients, dtype=torch.int64)
        self._keys = zeros(self._clients, dtype=torch.int64)

    def _advance(self, clients: int, slots: int, full: bool) -> None:
        """One step of the first clients."""
        batch = self._samples.index_select(0, self._step)[0, :clients, :slots]
        labels = self._shard.labels[batch]
        images = self._images.index_select(0, batch.flatten()).permute(0, 3, 1, 2)
        valid = None
        if not full:
            count = self._counts.index_select(0, self._step)[0, :clients, None]
            valid = torch.arange(slots, device=self._device) < count
        keys = streams.child_keys(self._keys[:clients], self._step) if self._network.random else None
        self._total[:clients] += self._differentiate(clients, images, labels, valid=valid, keys=keys)
        self._descend(clients)
        self._step += 1

    def _differentiate(
        self, clients: int, images: Tensor, labels: Tensor, *, valid: Tensor | None, keys: Tensor | None
    ) -> Tensor:
        """Each client's summed loss; leaves the gradient of its mean loss in `_gradient`.

        Running statistics change where they may, parameters do not.
        """
        gradient = self._gradient[:clients]
        parameters, statistics = (matrix[:clients] for matrix in self._work)
        moved = statistics if self._moving is None else statistics.clone()
        tensors = {name: view.detach() for name, view in self._workplace.views(parameters, moved).items()}
        learned = self._moving.entries if self._moving else [e for e in self._workplace.entries if e.trainable]
        leaves = [tensors[e.name].requires_grad_() for e in learned]
        sinks = {e.name: self._workplace.view(gradient, e) for e in learned}
        logits = self._network(tensors, images, training=True, valid=valid, keys=keys, sinks=sinks)
        losses = F.cross_entropy(logits, labels.flatten(), reduction="none").view_as(labels)
        if valid is None:
            summed, mean = losses.sum(1), losses.mean(1)
        else:
            summed = (losses * valid).sum(1)
            mean = summed / valid.sum(1).clamp(min=1)
        # A client's loss depends on its own row alone, so the gradient of the sum is every client's own gradient.
        parts = torch.autograd.grad(mean.sum(), leaves)
        elsewhere = [
            (sinks[e.name], part)
            for e, part in zip(learned, parts, strict=True)
            if part.data_ptr() != sinks[e.name].data_ptr()
        ]
        if elsewhere:
            torch._foreach_copy_([sink for sink, _ in elsewhere], [part for _, part in elsewhere])
        if self._moving is not None:
            statistics.copy_(torch.where(self._moving.statistics, moved, statistics))
        return summed.detach()

    @torch.no_grad()
    def _descend(self, clients: int) -> None:
        """One step of SGD on every row in place; columns that may not move keep their bits."""
        sgd, rows, gradient = self._sgd, self._work[0][:clients], self._gradient[:clients]
        velocity = None if self._velocity is None else self._velocity[:clients]
        if sgd.clip:
            if self._moving is not None:
                gradient.mul_(self._moving.parameters)
            norm = gradient.norm(dim=1, keepdim=True)
            gradient.mul_((sgd.clip / (norm + 1e-6)).clamp(max=1.0))
        if self._moving is None:
            torch._fused_sgd_(
                [rows],
                [gradient],
                [] if velocity is None else [velocity],
                weight_decay=sgd.weight_decay,
                momentum=sgd.momentum,
                lr=self._lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
            )
            return
        if sgd.weight_decay:
            gradient = gradient.add(rows, alpha=sgd.weight_decay)
        if velocity is not None:
            gradient = velocity.mul_(sgd.momentum).add_(gradient)
        rows.copy_(torch.where(self._moving.parameters, rows - self._lr * gradient, rows))


def _rounded_up(number: int, sizes: int) -> int:
    """To one of so many sizes between two powers of two."""
    unit = max(1, 2 ** (number - 1).bit_length() // 2 // sizes)
    return -(-number // unit) * unit
