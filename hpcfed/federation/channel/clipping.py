"""Clipping: no update is longer than C, so a client changes the sum of a round's
updates by at most C. An update is a row minus what the server sent.

By layer, each of L layers is clipped separately to C / √L. The squares of these bounds
add up to C², so the whole update has the same bound, and the same noise hides it.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from hpcfed.federation.channel import Memory
from hpcfed.federation.channel.channel import Upload
from hpcfed.federation.cohort import Cohort, update_norms
from hpcfed.models.layout import Layout
from hpcfed.runtime import randomness
from hpcfed.runtime.collectives import Collectives
from hpcfed.runtime.device import on_device


@dataclass
class ClipNorm:
    """C, which stays constant unless `replace` is called."""

    first: float
    memory: Memory

    def value(self, device: torch.device) -> Tensor:
        """Return C, on a device."""
        # Filled there: a copy from the host would wait for the device.
        first = torch.full((), self.first, dtype=torch.float64, device=device)
        return self.memory.common("clip_norm", first)

    def replace(self, value: Tensor) -> None:
        """Clip to another C from the next round on."""
        self.memory.keep("clip_norm", value)


LayerColumns = tuple[slice, ...]
"""The columns of one layer: its weights may be apart from its running statistics."""


def layer_columns(layout: Layout) -> tuple[LayerColumns, ...]:
    """Return the columns of every layer, a layer being a module with tensors."""
    layers: dict[str, LayerColumns] = {}
    for entry in layout.entries:
        columns = slice(entry.start, entry.stop)
        layers[entry.layer] = (*layers.get(entry.layer, ()), columns)
    return tuple(layers.values())


@dataclass
class Clipping:
    """Scales longer updates down to norm C, and leaves others as they are."""

    norm: ClipNorm
    layers: tuple[LayerColumns, ...] = ()
    """Layers that are clipped to their share of C; empty: clip whole updates."""
    phase: str = field(default="upload", init=False)
    _members: np.ndarray = field(default_factory=lambda: np.empty(0), init=False)
    _within: Tensor = field(default_factory=lambda: torch.empty(0), init=False)

    def __call__(self, upload: Upload) -> Upload:
        """Return the upload with updates of norm C at most.

        An update that is not finite stays so, and is excluded later.
        """
        rows, start, cohort = upload.rows, upload.start, upload.cohort
        limit = self.norm.value(rows.device)
        if self.layers:
            return replace(upload, rows=self._by_layer(rows, start, limit))
        norms = update_norms(start, rows, upload.sent)
        self._members, self._within = cohort.clients[cohort.chosen], norms <= limit
        # A norm of 0 gives infinity, which becomes 1; NaN stays NaN, and marks a
        # diverged row.
        factors = (limit / norms).clamp(max=1).to(rows.dtype)
        # A new matrix, because clients keep what they trained. With a factor of 1,
        # `lerp` returns exactly the same row.
        return replace(upload, rows=torch.lerp(start, rows, factors[:, None]))

    def _by_layer(self, rows: Tensor, start: Tensor, limit: Tensor) -> Tensor:
        share = limit / math.sqrt(len(self.layers))
        clipped = torch.empty_like(rows)
        for layer in self.layers:
            # In float64: ε relies on the bound, and float32 sums of many squares may
            # fall short.
            squares = rows.new_zeros(len(rows), dtype=torch.float64)
            for columns in layer:
                update = rows[:, columns] - start[:, columns]
                squares += update.square().sum(1, dtype=torch.float64)
            factors = (share / squares.sqrt()).clamp(max=1).to(rows.dtype)
            for columns in layer:
                clipped[:, columns] = torch.lerp(
                    start[:, columns], rows[:, columns], factors[:, None]
                )
        return clipped

    def within(self, cohort: Cohort) -> Tensor:
        """Return which of this rank's members had updates not longer than C. The cohort
        is that of the last upload, or part of it.
        """
        here = np.isin(self._members, cohort.clients[cohort.chosen])
        # Positions, not a mask: indexing by a mask makes the host wait for the GPU.
        return self._within[on_device(np.flatnonzero(here), self._within.device)]


@dataclass
class QuantileStep:
    """Moves C towards a quantile of the updates' norms (Andrew et al. 2021, Algorithm
    1), guided by a noisy count of updates within C.
    """

    quantile: float
    """γ, the share of updates that should be within C."""
    rate: float
    """η_C."""
    deviation: float
    """Standard deviation of the noise on the share: σ_b divided by the cohort size."""
    cohort_size: int
    """m, the expected number of clients in a round."""
    seed: int
    collectives: Collectives

    def __call__(
        self, clipping: Clipping, cohort: Cohort, device: torch.device
    ) -> None:
        """Replace C by C exp(−η_C (b̃ − γ)), the same on every rank."""
        within = clipping.within(cohort).to(device, torch.float64)
        # b − ½, as in the paper: clients that do not take part contribute 0, and one
        # client changes the sum by ½. Halves add up exactly, in any order.
        total = self.collectives.allreduce((within - 0.5).sum())
        generator = randomness.generator(self.seed, "clip count noise", cohort.round)
        noise = self.deviation * float(generator.standard_normal())
        share = 0.5 + total / self.cohort_size + noise
        step = torch.exp(-self.rate * (share - self.quantile))
        # From the next round on: this round's updates were clipped to the old C.
        clipping.norm.replace(clipping.norm.value(device) * step)
