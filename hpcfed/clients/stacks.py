"""Cuts clients into stacks that advance together: by the available memory, and into
halves if a stack runs out of memory.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from hpcfed.clients.job import TrainingJob
from hpcfed.errors import remark
from hpcfed.kernels.batch import MOST_CLIENTS
from hpcfed.runtime import accelerator

MEMORY_SHARE = 0.6
"""Share of the device's free memory for the rows and activations of a stack."""
CPU_ACTIVATIONS = 2**24
"""Floats of a stack's activations on a CPU; larger stacks gain nothing there."""

COPIES = 3.0
"""Floats that a training pass needs per activation: for itself, its gradient, and the
copies of the backward pass.
"""
COPIES_OVER_HALVES = 0.75
"""Floats per activation if a frozen network computes in bfloat16: half a float each.
Most of what a pass keeps are activations, since frozen layers have no gradients of
weights.
"""
MATRICES = 6
"""Matrices of the rows' size that every stack needs: rows in training, gradient,
momentum, rows set aside, rows as they come and go.
"""


class Stacks:
    """The sizes of an engine's stacks."""

    def __init__(
        self, *, columns: int, activations: int, alone: bool, copies: float = COPIES
    ) -> None:
        """`columns` are those of a row, `activations` those of one sample, of which a
        pass needs `copies`. `alone`: every client is a stack of its own.
        """
        self._columns = columns
        self._activations = activations
        self._alone = alone
        self._copies = copies
        self._fitting: dict[tuple[int, int], int] = {}
        """Clients that fit into free memory, by batch size and number of matrices of
        the rows' size; queried once, because that takes time.
        """
        self.most = 0
        """Largest stack after a larger one ran out of memory; 0: none did."""
        self.halvings = 0
        """How often stacks were halved because memory ran out."""

    def cut(
        self,
        order: np.ndarray,
        batch_size: int,
        rows: Tensor,
        *,
        matrices: int = MATRICES,
    ) -> list[np.ndarray]:
        """Cut the ordered clients into stacks that advance together."""
        if not len(order):
            return []
        size = 1
        if not self._alone:
            size = self.size(batch_size, rows, matrices=matrices)
        # After a halving all later stacks stay small, also those of evaluations.
        size = min(size, self.most or size, MOST_CLIENTS)
        if len(order) <= size:
            return [order]
        # Equal stacks, rather than full ones and a small remainder.
        return np.array_split(order, -(-len(order) // size))

    def size(self, batch_size: int, rows: Tensor, *, matrices: int = MATRICES) -> int:
        """Return how many clients fit into a GPU's memory, or pay on a CPU."""
        if rows.device.type == "cpu":
            return max(1, CPU_ACTIVATIONS // (batch_size * self._activations))
        if (batch_size, matrices) not in self._fitting:
            free = accelerator.free_memory(rows.device)
            floats = floats_of_client(
                columns=self._columns,
                activations=batch_size * self._activations,
                matrices=matrices,
                copies=self._copies,
            )
            fit = int(MEMORY_SHARE * free / (floats * rows.element_size()))
            self._fitting[batch_size, matrices] = max(1, fit)
        return self._fitting[batch_size, matrices]

    def halving(
        self,
        work: Callable[[np.ndarray], None],
        members: np.ndarray,
        ids: np.ndarray,
        doing: str,
        *,
        free: Callable[[], None],
    ) -> None:
        """Work on a stack; if memory runs out, use half as many clients from then on.

        `ids` name all clients of the call, for error messages. `free` releases memory
        and captured steps of the larger stack.
        """
        if self.most and len(members) > self.most:
            stacks = -(-len(members) // self.most)
            for smaller in np.array_split(members, stacks):
                self.halving(work, smaller, ids, doing, free=free)
            return
        try:
            work(members)
            return
        except Exception as error:
            _name(error, ids[members], doing)
            if not isinstance(error, torch.OutOfMemoryError):
                raise
            if len(members) == 1:
                error.add_note(
                    "not even one client fits in memory: use smaller batches or a "
                    "smaller network"
                )
                raise
        # Outside the handler, because the exception keeps alive whatever the failed
        # work had allocated.
        self.most = len(members) // 2
        self.halvings += 1
        free()
        accelerator.return_memory()
        remark(
            f"hpcfed: out of memory {doing} {len(members)} clients at a time; going on "
            f"with {self.most}"
        )
        self.halving(work, members, ids, doing, free=free)


def floats_of_client(
    *,
    columns: int,
    activations: float,
    matrices: int = MATRICES,
    copies: float = COPIES,
) -> float:
    """Return the floats of a client in training; `activations` are its batch's."""
    return matrices * columns + copies * activations


def num_matrices(job: TrainingJob) -> int:
    """Return how many matrices of the rows' size a stack of these clients needs."""
    matrices = MATRICES + max(0, job.recipe.num_moments - 1) + job.recipe.gradient
    if job.pull is not None:
        # References, masks and differences.
        matrices += 4
    for more in (job.correction, job.gates):
        if more is not None:
            # Once as given, once in the kernels' layout.
            matrices += 2
    return matrices


def _name(error: Exception, clients: np.ndarray, doing: str) -> None:
    """Add to an exception which clients were being processed."""
    named = ", ".join(map(str, clients[:8]))
    more = ", …" if len(clients) > 8 else ""
    plural = "s" if len(clients) > 1 else ""
    error.add_note(f"while {doing} client{plural} {named}{more}")
