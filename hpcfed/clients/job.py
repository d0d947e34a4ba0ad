"""What the engine is asked to do, and what it answers."""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from torch import Tensor

from hpcfed.clients.fisher import Fisher
from hpcfed.clients.pull import Pull
from hpcfed.clients.schedule import Length
from hpcfed.data.shards import Shard
from hpcfed.models.layout import Layout
from hpcfed.runtime.device import on_device


@dataclass(frozen=True)
class Sgd:
    """How one client trains."""

    epochs: int
    batch_size: int
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0
    """Largest norm of a client's gradient; 0: no limit."""
    steps: int = 0
    """So many steps in place of epochs; 0: by epochs."""
    augment: bool = False
    """Whether images are shifted and mirrored, anew in every step."""

    @property
    def length(self) -> Length:
        return Length(self.epochs, self.batch_size, self.steps)


@dataclass(frozen=True, eq=False)
class TrainingJob:
    """Local training of some clients: `rows[i]` on the data of client `clients[i]`."""

    rows: Tensor
    shard: Shard
    clients: np.ndarray
    """Positions in the shard."""
    sgd: Sgd
    keys: Tensor
    """Per client: seeds its order of samples and its dropout."""
    columns: Tensor | None = None
    """True where training may change a row; all other columns stay bit-identical. None:
    all may change.
    """
    pull: Pull | None = None
    """Draws row i to its reference i."""

    def subset(self, positions: np.ndarray) -> "TrainingJob":
        """Return the job of the clients at these positions."""
        at = on_device(positions, self.rows.device)
        return replace(
            self,
            rows=self.rows[at],
            clients=self.clients[positions],
            keys=self.keys[at],
            pull=None if self.pull is None else self.pull.subset(at),
        )


@dataclass(frozen=True)
class Score:
    """Correct answers and summed loss per client, on the device, and its samples."""

    correct: Tensor
    loss: Tensor
    count: np.ndarray


class RowEngine(Protocol):
    """An engine, or one seed's access to the engine that all seeds share."""

    layout: Layout

    @property
    def mode(self) -> str: ...

    @property
    def halvings(self) -> int: ...

    @property
    def fisher(self) -> Fisher: ...

    def train(self, job: TrainingJob) -> tuple[Tensor, Tensor]:
        """Return new rows, and each client's mean loss in training (NaN without data)."""

    def evaluate(self, rows: Tensor, shard: Shard, clients: np.ndarray) -> Score:
        """Score `rows[i]` on the data of the shard's client `clients[i]`."""

    def forget(self) -> None:
        """Free what is kept for training on the same shards again."""
