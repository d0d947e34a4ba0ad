"""Local training of a stack of clients: SGD steps on a matrix that stays in place, so
that a step can be captured.
"""

from functools import partial

import torch
from torch import Tensor

from hpcfed.clients.capture import Replays
from hpcfed.clients.job import Sgd, TrainingJob
from hpcfed.clients.pull import StackPull, Strengths
from hpcfed.clients.schedule import step_shapes
from hpcfed.clients.step_tables import StepTables
from hpcfed.data.shards import Shard
from hpcfed.kernels.batch import cross_entropy, gather_images
from hpcfed.kernels.linear import Update
from hpcfed.kernels.sgd import Rule, descend
from hpcfed.models.kernel_layout import KernelLayout, KernelRows
from hpcfed.models.layout import Entry
from hpcfed.models.stack import StackedNetwork


class TrainableColumns:
    """The columns of a row that training may change, in the kernels' layout."""

    def __init__(
        self, columns: Tensor, layout: KernelLayout, device: torch.device
    ) -> None:
        mask = columns.to(device, torch.float32).unsqueeze(0)
        # Laid out like a row; padding columns come out as not trainable.
        kernel_mask = layout.zeros(1, mask)
        layout.load(mask, kernel_mask)
        parameters, statistics = kernel_mask
        self.parameters = parameters[0] != 0
        self.statistics = statistics[0] != 0
        self.entries: list[Entry] = []
        """The tensors with trainable columns; gradients of others are not computed."""
        on_host = columns.cpu()
        for plain, e in zip(layout.plain.entries, layout.entries, strict=True):
            any_trainable = bool(on_host[plain.start : plain.stop].any())
            if e.trainable and any_trainable:
                self.entries.append(e)


class StackTraining:
    """The memory of a stack in training and the steps on it; for one shard, one kind of
    SGD, some columns.

    A stack is loaded into the first rows. Its clients are ordered by their number of
    steps, longest first. A client that has finished may be advanced further, because
    steps are captured for a few sizes of stacks only; its result is set aside before.
    """

    def __init__(
        self,
        network: StackedNetwork,
        layout: KernelLayout,
        shard: Shard,
        sgd: Sgd,
        trainable: TrainableColumns | None,
        strengths: Strengths | None = None,
        *,
        dtype: torch.dtype,
    ) -> None:
        self._network = network
        self._layout = layout
        self._shard = shard
        self._sgd = sgd
        self._trainable = trainable
        self._pull = None if strengths is None else StackPull(strengths, layout)
        self._device = shard.images.device
        # Copies nothing where images are channels-last.
        self._images = shard.images.permute(0, 2, 3, 1).contiguous()
        self._tables = StepTables(shard, sgd, network.random_layers)
        self._slots = self._tables.slots
        self._replays = Replays(self._device)
        self._rule = Rule(sgd.momentum, sgd.weight_decay, sgd.clip)
        # Learning rate and step are on the device: a captured step must read them there.
        self._lr = torch.zeros((), dtype=dtype, device=self._device)
        self._step = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._capacity = 0
        self._aside: tuple[Tensor, ...] = ()

    def run(self, job: TrainingJob, trained: Tensor) -> Tensor:
        """Train a stack's rows into `trained`; return the clients' mean losses."""
        count = len(job.rows)
        shapes = step_shapes(self._tables.sizes[job.clients], self._sgd.length)
        self._reserve(count)
        kernel_rows = self._first(count)
        if self._layout.padded:
            # A client that diverged may have left NaN between the tensors.
            kernel_rows[0].zero_()
            self._gradient.zero_()
        self._layout.load(job.rows, kernel_rows)
        if self._pull is not None:
            assert job.pull is not None, "made for clients that are pulled"
            self._pull.load(job.pull)
        self._tables.load(job.clients, job.keys)
        self._lr.fill_(job.sgd.lr)
        self._replays.run(count, partial(self._begin, count))
        # Steps go from long to short: clients drop out at the end of the stack.
        active = count
        for shape in shapes:
            if shape.clients < active:
                self._set_aside(slice(shape.clients, active))
                active = shape.clients
            captured = self._captured_shape(*shape)
            self._replays.run(captured, partial(self._advance, *captured))
        if active < count:
            for matrix, aside in zip(self._rows, self._aside, strict=True):
                matrix[active:count] = aside[active:count]
        self._layout.store(kernel_rows, trained)
        samples_seen = self._tables.counts[:, :count].sum(0)
        return self._total_loss[:count] / samples_seen

    def _first(self, clients: int) -> KernelRows:
        parameters, statistics = self._rows
        return parameters[:clients], statistics[:clients]

    def _captured_shape(
        self, active: int, slots: int, full: bool
    ) -> tuple[int, int, bool]:
        """Return clients, slots and whether all slots are full, rounded up on a GPU.

        So a few captured steps serve all shapes. A stack of one client keeps its exact
        shape, for which torch's own kernels need no mask.
        """
        if self._device.type == "cpu" or self._capacity == 1:
            return active, slots, full
        # Our own kernels serve from two clients on.
        clients = min(self._capacity, _rounded_up(max(active, 2), 8))
        wide = min(self._slots, _rounded_up(slots, 1))
        is_exact = (clients, wide) == (active, slots)
        return clients, wide, full and is_exact

    def _set_aside(self, clients: slice) -> None:
        """Save the rows of clients that have finished."""
        # Only uneven clients need this memory.
        if not self._aside:
            self._aside = self._layout.zeros(self._capacity, self._lr)
        for matrix, aside in zip(self._rows, self._aside, strict=True):
            aside[clients] = matrix[clients]

    def _reserve(self, clients: int) -> None:
        """Make the memory large enough; captured steps are lost when it moves."""
        if clients <= self._capacity:
            return
        self._capacity = clients
        # Graphs hold addresses of the memory that is now replaced.
        self._replays.forget()
        self._aside = ()
        self._rows = self._layout.zeros(clients, self._lr)
        self._gradient = torch.zeros_like(self._rows[0])
        self._velocity = None
        if self._sgd.momentum:
            self._velocity = torch.zeros_like(self._gradient)
        if self._pull is not None:
            self._pull.reserve(clients, self._lr)
        self._total_loss = torch.zeros(
            clients, dtype=self._lr.dtype, device=self._device
        )
        self._tables.reserve(clients)

    def _begin(self, clients: int) -> None:
        """Draw the order of samples, and reset losses, step and momentum."""
        self._tables.draw(clients)
        self._total_loss.zero_()
        self._step.zero_()
        if self._velocity is not None:
            self._velocity.zero_()

    def _advance(self, clients: int, slots: int, full: bool) -> None:
        """Take one step with the first clients."""
        tables = self._tables
        images = gather_images(
            self._images,
            tables.samples,
            self._step,
            clients,
            slots,
            shifts=tables.shifts,
            blank=self._shard.blank,
        )
        valid = None
        if self._network.masked and not full:
            valid = tables.valid(self._step, clients, slots)
        keys = tables.layer_keys(self._step, clients)
        updated = self._differentiate(clients, images, valid, keys)
        if self._pull is not None:
            parameters, _ = self._first(clients)
            self._pull.add(parameters, self._gradient[:clients])
        self._descend(clients, updated)
        # On the device too, so that a replayed step goes on by itself.
        self._step += 1

    def _differentiate(
        self, clients: int, images: Tensor, valid: Tensor | None, keys: Tensor | None
    ) -> set[str]:
        """Write the gradient of each client's mean loss to `_gradient`, and add its
        summed loss to `_total_loss`.

        Running statistics change where they may. Parameters do not, except weights that
        update themselves: their names are returned.
        """
        parameters, statistics = self._first(clients)
        # Batch norm changes its statistics in place, frozen ones too: those of a copy.
        new_statistics = statistics if self._trainable is None else statistics.clone()
        views = self._layout.views(parameters, new_statistics)
        tensors = {name: view.detach() for name, view in views.items()}
        updates = self._updates(tensors, len(images) // clients)
        entries = self._entries_with_gradient(updates)
        gradient = self._gradient[:clients]
        leaves = []
        sinks = {}
        for e in entries:
            leaves.append(tensors[e.name].requires_grad_())
            sinks[e.name] = self._layout.view(gradient, e)
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
            self._tables.samples,
            self._tables.counts,
            self._step,
            self._total_loss[:clients],
        )
        # A client's loss depends on its own row alone, so one pass gives every client
        # its own gradient.
        try:
            gradients = torch.autograd.grad(loss, leaves)
        finally:
            self._network.join()
        _copy_missing(gradients, list(sinks.values()))
        if self._trainable is not None:
            mask = self._trainable.statistics
            statistics.copy_(torch.where(mask, new_statistics, statistics))
        return set(updates)

    def _entries_with_gradient(self, updates: dict[str, Update]) -> list[Entry]:
        """Return the trainable tensors, except those that update themselves."""
        entries = self._layout.entries
        if self._trainable is not None:
            entries = self._trainable.entries
        return [e for e in entries if e.trainable and e.name not in updates]

    def _updates(self, tensors: dict[str, Tensor], slots: int) -> dict[str, Update]:
        """Return which weights update themselves in the backward pass, and how.

        None does where columns are frozen, or where clipping or a pull needs the whole
        gradient first.
        """
        if self._trainable is not None or self._rule.clip or self._pull is not None:
            return {}
        names = self._network.updating(tensors, slots)
        clients = len(next(iter(tensors.values())))
        updates = {}
        for e in self._layout.entries:
            if e.name not in names:
                continue
            velocity = None
            if self._velocity is not None:
                velocity = self._layout.view(self._velocity[:clients], e)
            updates[e.name] = Update(velocity, self._lr, self._rule)
        return updates

    def _descend(self, clients: int, updated: set[str]) -> None:
        """Take a step of SGD on the rows in place; frozen columns keep their bits."""
        # Columns between the weights that have updated themselves.
        edges = [0]
        for e in self._layout.entries:
            if e.name in updated:
                edges += [e.start, e.stop]
        edges.append(self._layout.widths[0])
        starts = edges[::2]
        stops = edges[1::2]
        for start, stop in zip(starts, stops, strict=True):
            velocity = trainable = None
            if self._velocity is not None:
                velocity = self._velocity[:clients, start:stop]
            if self._trainable is not None:
                trainable = self._trainable.parameters[start:stop]
            descend(
                self._rows[0][:clients, start:stop],
                self._gradient[:clients, start:stop],
                velocity,
                trainable,
                self._lr,
                self._rule,
            )


def _copy_missing(gradients: tuple[Tensor, ...], sinks: list[Tensor]) -> None:
    """Copy gradients to their sinks, except those that a layer has written there."""
    sources = []
    targets = []
    for gradient, sink in zip(gradients, sinks, strict=True):
        if gradient.data_ptr() != sink.data_ptr():
            sources.append(gradient)
            targets.append(sink)
    if sources:
        # One launch for all of them.
        torch._foreach_copy_(targets, sources)


def _rounded_up(number: int, sizes: int) -> int:
    """Round up to one of so many sizes between two powers of two."""
    power_of_two = 2 ** (number - 1).bit_length() // 2
    unit = max(1, power_of_two // sizes)
    return -(-number // unit) * unit
