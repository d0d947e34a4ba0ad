"""How clients are cut into stacks that are advanced together: by the memory that there
is, and by half as many where a stack has found none.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from hpcfed.clients.job import TrainingJob
from hpcfed.errors import remark
from hpcfed.kernels.batch import MOST_CLIENTS

MEMORY_SHARE = 0.6
"""Share of the device's free memory for the rows and activations of a stack."""
CPU_ACTIVATIONS = 2**24
"""Floats of activations of a stack on a CPU; larger stacks gain nothing there."""

MATRICES = 6
"""Matrices as large as the rows that every stack takes: rows in training, gradient,
momentum, rows set aside, rows as they come and go.
"""


class Stacks:
    """The sizes of an engine's stacks."""

    def __init__(self, *, columns: int, activations: int, alone: bool) -> None:
        """`columns` are those of a row, `activations` those of one sample. `alone`:
        every client is a stack by itself.
        """
        self._columns = columns
        self._activations = activations
        self._alone = alone
        self._fitting: dict[tuple[int, int], int] = {}
        """Clients that fit into free memory, by batch size and matrices as large as the
        rows; asked once, because asking takes time.
        """
        self.most = 0
        """Clients of a stack after larger ones ran out of memory; 0: none did."""
        self.halvings = 0
        """How often stacks were halved for lack of memory."""

    def cut(
        self,
        order: np.ndarray,
        batch_size: int,
        rows: Tensor,
        *,
        matrices: int = MATRICES,
    ) -> list[np.ndarray]:
        """Cut the ordered clients into stacks that are advanced together."""
        if not len(order):
            return []
        size = 1
        if not self._alone:
            size = self.size(batch_size, rows, matrices=matrices)
        size = min(size, self.most or size, MOST_CLIENTS)
        # Evenly, rather than full stacks and a small rest.
        return np.array_split(order, -(-len(order) // size))

    def size(self, batch_size: int, rows: Tensor, *, matrices: int = MATRICES) -> int:
        """Return how many clients fit into a GPU's free memory, or pay on a CPU."""
        if rows.device.type == "cpu":
            return max(1, CPU_ACTIVATIONS // (batch_size * self._activations))
        if (batch_size, matrices) not in self._fitting:
            free, _ = torch.cuda.mem_get_info(rows.device)
            floats = floats_of_client(
                columns=self._columns,
                activations=batch_size * self._activations,
                matrices=matrices,
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
        """Work on a stack; out of memory, take half as many clients from then on.

        `ids` name all clients of the call, for the message of a failure. `free` gives
        back memory and captured steps of the larger stack.
        """
        if self.most and len(members) > self.most:
            stacks = -(-len(members) // self.most)
            for smaller in np.array_split(members, stacks):
                self.halving(work, smaller, ids, doing, free=free)
            return
        try:
            with _naming(ids[members], doing):
                work(members)
            return
        except torch.OutOfMemoryError as error:
            if len(members) == 1:
                error.add_note(
                    "not even one client finds memory: smaller batches or a smaller "
                    "network need less"
                )
                raise
        # Outside of the handler, because the exception keeps alive whatever the failed
        # work had allocated.
        self.most = len(members) // 2
        self.halvings += 1
        free()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        remark(
            f"hpcfed: out of memory {doing} {len(members)} clients at a time; going on "
            f"with {self.most}"
        )
        self.halving(work, members, ids, doing, free=free)


def floats_of_client(
    *, columns: int, activations: float, matrices: int = MATRICES
) -> float:
    """Return the floats that training takes for each client of a stack, whose batch has
    this number of activations.
    """
    # Activations, their gradients, and what the backward pass lays out anew.
    return matrices * columns + 3 * activations


def num_matrices(job: TrainingJob) -> int:
    """Return how many matrices as large as the rows a stack of these clients takes."""
    matrices = MATRICES + max(0, job.recipe.num_moments - 1) + job.recipe.gradient
    if job.pull is not None:
        # References, masks and differences.
        matrices += 4
    for more in (job.correction, job.gates):
        if more is not None:
            # As it comes, and in the kernels' layout.
            matrices += 2
    return matrices


@contextmanager
def _naming(clients: np.ndarray, doing: str) -> Iterator[None]:
    """Add to an exception which clients were being worked on."""
    try:
        yield
    except Exception as error:
        named = ", ".join(map(str, clients[:8]))
        more = ", …" if len(clients) > 8 else ""
        plural = "s" if len(clients) > 1 else ""
        error.add_note(f"while {doing} client{plural} {named}{more}")
        raise
