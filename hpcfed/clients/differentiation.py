"""Gradients of a stack of clients: one backward pass gives every client its own."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hpcfed.clients.objective import OBJECTIVES, StepTargets
from hpcfed.clients.optimiser import StackOptimiser
from hpcfed.data.shards import Shard
from hpcfed.kernels.linear import Update
from hpcfed.models.forward import Forward
from hpcfed.models.kernel_layout import KernelLayout, KernelRows
from hpcfed.models.layout import Entry
from hpcfed.runtime.accelerator import is_gpu

HALVES_ALIGNMENT = 8
"""Columns: cuDNN loads 16 bytes of bfloat16 at once."""


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


@dataclass(frozen=True)
class StepBatch:
    """What the clients of a step train on."""

    inputs: Tensor
    """[clients · slots, …]."""
    targets: StepTargets
    valid: Tensor | None
    """Which slots hold samples; None: all, or the network does not need to know."""
    keys: Tensor | None
    """Keys for the random numbers of layers."""
    widest: bool = False
    """Whether no step has more slots."""


@dataclass(frozen=True)
class StepMemory:
    """Memory of a stack's first clients, which a backward pass reads and writes."""

    layout: KernelLayout
    rows: KernelRows
    gradient: Tensor
    halves: Tensor | None
    """The rows in bfloat16, if the network takes such weights."""
    total_loss: Tensor
    tokens: Tensor

    # Kept, because all steps of this many clients use the same memory.
    @cached_property
    def views(self) -> dict[str, Tensor]:
        """Every tensor of the rows, by name."""
        return self.layout.views(*self.rows)

    @cached_property
    def sinks(self) -> dict[str, Tensor]:
        """Where the gradients of parameters go, by name."""
        trained = (e for e in self.layout.entries if e.trainable)
        return {e.name: self.layout.view(self.gradient, e) for e in trained}


class Differentiation:
    """Forward and backward passes of one network on one shard, for some columns."""

    def __init__(
        self,
        network: Forward,
        layout: KernelLayout,
        shard: Shard,
        optimiser: StackOptimiser,
        trainable: TrainableColumns | None,
        *,
        gradient_first: bool,
    ) -> None:
        """`gradient_first`: the whole gradient is needed before rows change."""
        self._network = network
        self._layout = layout
        self._optimiser = optimiser
        self._trainable = trainable
        self._updates_itself = not gradient_first and trainable is None
        self._objective = OBJECTIVES[shard.task]
        self._halved: list[Entry] = []
        """The weights that the network takes in bfloat16."""
        # The gradient of the loss by itself. Kept on a GPU: autograd would launch a
        # kernel in every step to make it. On a CPU autograd makes it: if it were given,
        # torch would load its compiler's symbols first, for a third of a second.
        device = shard.inputs.device
        self._one = torch.ones((), device=device) if is_gpu(device) else None

    def choose_halves(self, clients: int, device: torch.device) -> bool:
        """Choose the weights to be rounded to bfloat16; tell whether there are any."""
        names = self._network.halved(clients, device)
        self._halved = []
        for e in self._layout.entries:
            is_aligned = e.start % HALVES_ALIGNMENT == 0
            if e.trainable and e.name in names and is_aligned:
                self._halved.append(e)
        # The network infers the rows' own type from the tensors that keep it.
        keeps = self._network.over_halves
        if not keeps and len(self._halved) == len(self._layout.entries):
            self._halved = []
        return bool(self._halved)

    def __call__(self, batch: StepBatch, memory: StepMemory) -> set[str]:
        """Write the gradient of each client's mean loss, and add up its loss.

        Running statistics change if they may. Parameters do not, except weights that
        update themselves: their names are returned.
        """
        parameters, statistics = memory.rows
        views = memory.views
        if self._trainable is not None:
            # Batch norm changes statistics in place, even frozen ones: give it a copy.
            new_statistics = statistics.clone()
            views = self._layout.views(parameters, new_statistics)
        tensors = {name: view.detach() for name, view in views.items()}
        halves = {}
        if memory.halves is not None:
            for e in self._halved:
                halves[e.name] = self._layout.view(memory.halves, e).detach()
        # Adapters keep their type: their gradients are not rounded.
        if not self._network.over_halves:
            tensors |= halves
        updates = self._updates(tensors, len(batch.inputs) // len(parameters))
        entries = self._entries_with_gradient(updates)
        # Our own layers write gradients straight to their sinks, which are slices of
        # the stack's gradient; `_copy_missing` copies what other layers return.
        leaves = []
        sinks = {}
        for e in entries:
            leaves.append(tensors[e.name].requires_grad_())
            sinks[e.name] = memory.sinks[e.name]
        outputs = self._network(
            tensors,
            batch.inputs,
            training=True,
            valid=batch.valid,
            keys=batch.keys,
            sinks=sinks,
            halves=halves,
            updates=updates,
            bounded=self._objective.bounded,
            widest=batch.widest,
        )
        loss = self._objective.loss(
            outputs, batch.targets, memory.total_loss, memory.tokens
        )
        # Outputs may be a language model's largest tensor, and their gradient is as
        # large.
        del outputs
        # A client's loss depends only on its own row, so one pass gives every client
        # its own gradient.
        try:
            # A user's network may leave some of its parameters unused.
            one = None if self._one is None else self._one.to(loss.dtype)
            gradients = torch.autograd.grad(loss, leaves, one, allow_unused=True)
        finally:
            # Gradients may still be on their way to sinks, and changed buffers to rows.
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

        None do if columns are frozen, or if the whole gradient is needed first.
        """
        if not (self._updates_itself and self._optimiser.fits_backward):
            return {}
        names = self._network.updating(tensors, slots)
        clients = len(next(iter(tensors.values())))
        updates = {}
        for e in self._layout.entries:
            if e.name in names:
                updates[e.name] = self._optimiser.update(e, clients)
        return updates


def _copy_missing(gradients: tuple[Tensor | None, ...], sinks: list[Tensor]) -> None:
    """Copy gradients to their sinks, unless a layer has already written them there."""
    pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    on_gpu = bool(sinks) and is_gpu(sinks[0].device)
    for gradient, sink in zip(gradients, sinks, strict=True):
        if gradient is None:
            sink.zero_()
        elif gradient.data_ptr() != sink.data_ptr():
            targets, sources = pairs.setdefault(gradient.dtype, ([], []))
            # As vectors, so that both sides have the same strides.
            if on_gpu and len(sink) == 1:
                sink, gradient = _as_stored(sink), _as_stored(gradient)
            targets.append(sink)
            sources.append(gradient)
    for targets, sources in pairs.values():
        # One launch for all tensors of a type, if both sides have the same strides.
        torch._foreach_copy_(targets, sources)


def _as_stored(tensor: Tensor) -> Tensor:
    """Return one client's tensor on a GPU as a vector in memory order."""
    own = tensor.squeeze(0)
    if own.dim() == 4:
        # Weights of convolutions are channels-last.
        own = own.permute(0, 2, 3, 1)
    return own.reshape(-1)
