"""What a stack's steps read: its clients' samples and keys, drawn for all steps."""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from hpcfed.clients.capture import Run, plainly
from hpcfed.clients.job import Recipe
from hpcfed.clients.schedule import (
    num_epochs,
    num_steps,
    training_order,
    training_places,
    training_shifts,
)
from hpcfed.data.shards import Shard
from hpcfed.runtime import randomness
from hpcfed.runtime.device import on_device

# Streams of a client's key. Their numbers are part of every recorded result.
_ORDER, _DROPOUT, _AUGMENTATION = 0, 1, 2


class StepTables:
    """Tables [steps, capacity, …] whose memory stays in place, for captured steps."""

    def __init__(
        self, shard: Shard, recipe: Recipe, random_layers: int, *, limited: bool = False
    ) -> None:
        """`limited`: clients may have to stop before the end of the recipe."""
        self._limited = limited
        self._shard = shard
        self._recipe = recipe
        self._random_layers = random_layers
        self._device = shard.inputs.device
        self.sizes = np.asarray(shard.sizes, np.int64)
        """Samples of each of the shard's clients."""
        self._sizes_on_device = on_device(self.sizes, self._device)
        self._epochs = num_epochs(self.sizes, recipe.length)
        # Over all clients of the shard, not only those of a stack: tables then fit
        # every cohort, and captured steps stay valid.
        self.steps = int(num_steps(self.sizes, recipe.length).max())
        """The most steps of a client."""
        # The shard's index may be wider than the samples of these clients.
        self.slots = min(shard.index.shape[1], recipe.batch_size)
        """The most samples of a client in a step."""

    def reserve(self, capacity: int) -> None:
        """Allocate memory for stacks of up to `capacity` clients."""
        self._clients = self._zeros(capacity)
        self._owned = self._zeros(capacity)
        self._keys = self._zeros(capacity)
        self._limits = self._zeros(capacity)
        self.samples = self._zeros(self.steps, capacity, self.slots)
        """Positions among the shard's images; meaningless beyond `counts`."""
        self.counts = self._zeros(self.steps, capacity)
        """Samples of each client in each step."""
        self.shifts = torch.zeros_like(self.samples) if self._recipe.augment else None
        """How each image is shifted and mirrored; None without augmentation."""
        self._layer_keys = self._zeros(self.steps, self._random_layers, capacity)
        self._places = torch.zeros_like(self.samples)
        self._there = b""
        """The clients that are on the device, as the bytes of an array."""
        self._planned: tuple[bytes, bytes] | None = None
        """The sizes, and limits, that `counts` and `_places` are for, as bytes."""
        self.seen = self._zeros(0)
        """Samples of all steps of each client; a new tensor for each plan."""

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self._device)

    def load(
        self,
        clients: np.ndarray,
        sizes: np.ndarray,
        keys: Tensor,
        limits: np.ndarray | None = None,
        *,
        run: Run = plainly,
    ) -> None:
        """Take in a stack's clients, as positions, their sizes, keys and most steps;
        plan their steps by `run`.
        """
        # Not captured: values change, addresses do not.
        count = len(clients)
        self._keys[:count] = keys
        # Bytes are compared in less than a tenth of the time that arrays take.
        if (there := clients.tobytes()) != self._there:
            self._clients[:count].copy_(torch.from_numpy(clients), non_blocking=True)
            self._there = there
        assert not self._limited or limits is not None, "made for limited clients"
        facts = sizes.tobytes(), b"" if limits is None else limits.tobytes()
        # Cohorts often repeat the sizes of the last one, if not its clients.
        if facts != self._planned:
            self._planned = None
            if limits is not None:
                self._limits[:count].copy_(torch.from_numpy(limits), non_blocking=True)
            run(("plan", count), partial(self._plan, count))
            self.seen = self.counts[:, :count].sum(0)
            self._planned = facts

    def _plan(self, count: int) -> None:
        """Fill in what depends on the clients' sizes and limits only."""
        # Nothing here synchronises with the host: this is captured like a step.
        self._owned[:count] = self._sizes_on_device[self._clients[:count]]
        places, counts = training_places(
            self._owned[:count],
            self._shard.index.shape[1],
            self._recipe.length,
            epochs=self._epochs,
            steps=self.steps,
        )
        if self._limited:
            # A client may be advanced beyond its last step, which must not count.
            step = torch.arange(self.steps, device=self._device)[:, None]
            counts = counts * (step < self._limits[:count])
        self._places[:, :count] = places
        self.counts[:, :count] = counts

    def draw(self, count: int) -> None:
        """Draw the samples of the first `count` clients, entirely on the device."""
        keys = self._keys[:count]
        order = training_order(
            self._shard.index[self._clients[:count]],
            self._owned[:count],
            randomness.child_keys(keys, _ORDER),
            self._recipe.length,
            epochs=self._epochs,
        )
        self.samples[:, :count] = order[self._places[:, :count]]
        if self.shifts is not None:
            augmentation_keys = randomness.child_keys(keys, _AUGMENTATION)
            # Drawn for whole batches, so that a client's numbers do not depend on the
            # number of slots of its stack.
            repeat = self._recipe.repeat
            batches = -(-self.steps // repeat)
            shifts = training_shifts(
                augmentation_keys, self._recipe.batch_size, batches
            )
            # Repeats of a minibatch are shifted and mirrored in the same way.
            shifts = shifts.repeat_interleave(repeat, 0)[: self.steps]
            self.shifts[:, :count] = shifts[:, :, : self.slots]
        if self._random_layers:
            steps = torch.arange(self.steps, device=self._device)[:, None]
            layers = torch.arange(self._random_layers, device=self._device)[:, None]
            dropout_keys = randomness.child_keys(keys, _DROPOUT)
            step_keys = randomness.child_keys(dropout_keys, steps)
            self._layer_keys[:, :, :count] = randomness.child_keys(
                step_keys[:, None], layers
            )

    def valid(self, step: Tensor, clients: int, slots: int) -> Tensor:
        """Return [clients, slots], True where a slot holds a sample in this step."""
        count = self.counts.index_select(0, step)[0, :clients, None]
        return torch.arange(slots, device=self._device) < count

    def layer_keys(self, step: Tensor, clients: int) -> Tensor | None:
        """Return [random layers, clients] keys of this step's dropout, if any."""
        if not self._random_layers:
            return None
        return self._layer_keys.index_select(0, step)[0, :, :clients]
