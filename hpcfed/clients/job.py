"""What the engine is asked to do, and what it answers."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from hpcfed.clients.fisher import Fisher
from hpcfed.clients.objective import NOTHING, Sums, Wanted
from hpcfed.clients.pull import Pull
from hpcfed.clients.schedule import Length, Work, num_samples, num_steps, work_of
from hpcfed.data.shards import Shard
from hpcfed.models.cost import Cost
from hpcfed.models.layout import Layout
from hpcfed.options.rates import RateSchedule
from hpcfed.runtime.device import on_device

if TYPE_CHECKING:  # it knows the sizes of stacks, which know jobs
    from hpcfed.clients.footprint import Footprint

Optimiser = Literal["sgd", "adam", "adamw"]


@dataclass(frozen=True)
class Recipe:
    """How one client trains."""

    epochs: int
    batch_size: int
    lr: float
    momentum: float = 0.0
    """Momentum of SGD; starts from zero, like the moments of Adam."""
    weight_decay: float = 0.0
    """L2 decay of SGD and Adam, decoupled decay of AdamW."""
    clip: float = 0.0
    """Largest norm of a client's gradient; 0: no limit."""
    steps: int = 0
    """Number of steps, instead of epochs; 0: by epochs."""
    repeat: int = 1
    """Consecutive steps on the same minibatch."""
    augment: bool = False
    """Whether images are shifted and mirrored, drawn anew in every step."""

    optimiser: Optimiser = "sgd"
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    schedule: RateSchedule | None = None
    """How `lr` changes over a client's own steps; None: constant."""
    gradient: bool = False
    """Whether the result is each client's gradient at its row instead of the trained
    row. It is the gradient of the mean loss over the minibatches of all steps.
    Momentum, decay and clipping are not applied.
    """
    nesterov: bool = False
    """Whether to use Nesterov momentum, as torch.optim.SGD does."""

    # Kept, as is the next one: a run asks for them in every round.
    @cached_property
    def length(self) -> Length:
        return Length(self.epochs, self.batch_size, self.steps, self.repeat)

    @cached_property
    def without_rate(self) -> "Recipe":
        """The recipe apart from its learning rate."""
        return replace(self, lr=0.0)

    @property
    def num_moments(self) -> int:
        """How many matrices of running moments the optimiser keeps."""
        if self.optimiser == "sgd":
            return 1 if self.momentum else 0
        return 2


@dataclass(frozen=True, eq=False)
class TrainingJob:
    """Local training of some clients: `rows[i]` on the data of client `clients[i]`."""

    rows: Tensor
    shard: Shard
    clients: np.ndarray
    """Positions in the shard."""
    recipe: Recipe
    keys: Tensor
    """One per client: seeds its order of samples and its dropout."""
    columns: Tensor | None = None
    """True where training may change a row; others keep their bits. None: all."""
    pull: Pull | None = None
    """Draws row i towards its reference i."""
    correction: Tensor | None = None
    """A row per client, added to its gradient in every step, before clipping, decay and
    momentum. Columns of running statistics are ignored.
    """
    gates: Tensor | None = None
    """A row of booleans per client. Where it is False, the client's gradient is 0 in
    every step, for example for channels that the client does not have. Unlike
    `columns`, gates do not stop decay and running statistics.
    """
    rates: Tensor | None = None
    """A learning rate per client, float64, instead of the recipe's."""
    limits: np.ndarray | None = None
    """The most steps of each client, whatever the recipe says; learning rates are as if
    training went on. None: no limit.
    """

    @cached_property
    def work(self) -> Work:
        """What the clients do, all together."""
        sizes = self.shard.samples[self.clients]
        return work_of(sizes, self.recipe.length, self.limits)

    def num_steps(self) -> np.ndarray:
        """Return the steps that each client takes."""
        steps = num_steps(self.shard.samples[self.clients], self.recipe.length)
        return steps if self.limits is None else np.minimum(steps, self.limits)

    def num_samples(self) -> np.ndarray:
        """Return the samples of all steps of each client."""
        sizes = self.shard.samples[self.clients]
        return num_samples(sizes, self.recipe.length, self.limits)

    def subset(self, positions: np.ndarray, at: Tensor | None = None) -> "TrainingJob":
        """Return the job of the clients at these positions, which `at` has on the
        device.
        """
        if at is None:
            at = on_device(positions, self.rows.device)
        shared = len(self.rows) > 1 and self.rows.stride(0) == 0
        return replace(
            self,
            # `columns` is one mask for all clients, so it stays as it is. A single row,
            # expanded, stays one.
            rows=self.rows[: len(positions)] if shared else self.rows[at],
            clients=self.clients[positions],
            keys=self.keys[at],
            pull=None if self.pull is None else self.pull.subset(at),
            correction=None if self.correction is None else self.correction[at],
            gates=None if self.gates is None else self.gates[at],
            rates=None if self.rates is None else self.rates[at],
            limits=None if self.limits is None else self.limits[positions],
        )


@dataclass(frozen=True)
class Losses:
    """Training losses of clients, on the device."""

    mean: Tensor
    """Each client's mean loss; NaN without data."""
    seen: Tensor
    """The number of samples or tokens in that mean."""
    positions: Tensor | None = None
    """Positions of each client's texts in all steps, with padding; None: samples are
    not texts.
    """

    @classmethod
    def none(cls, rows: Tensor, *, texts: bool) -> "Losses":
        """Return those of clients that have not trained."""
        nothing = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
        positions = nothing.clone() if texts else None
        return cls(rows.new_full((len(rows),), torch.nan), nothing, positions)

    def only(self, at: Tensor) -> "Losses":
        """Return the losses of the clients at these positions."""
        positions = None if self.positions is None else self.positions[at]
        return Losses(self.mean[at], self.seen[at], positions)

    def put(self, at: Tensor | slice, found: "Losses") -> None:
        """Take over the losses of some clients."""
        self.mean[at] = found.mean
        self.seen[at] = found.seen
        if self.positions is not None:
            assert found.positions is not None
            self.positions[at] = found.positions


@dataclass(frozen=True)
class Score:
    """Sums over each client's data, on the device: "loss", "count" (samples or tokens),
    "correct" if answers can be right, and whatever else was wanted.
    """

    sums: Sums

    @property
    def correct(self) -> Tensor:
        return self.sums["correct"]

    @property
    def loss(self) -> Tensor:
        return self.sums["loss"]

    @property
    def count(self) -> Tensor:
        return self.sums["count"]


class RowEngine(Protocol):
    """An engine, or one run's access to the engine that stacked runs share."""

    layout: Layout

    @property
    def mode(self) -> str: ...

    @property
    def reason(self) -> str: ...

    @property
    def bf16(self) -> bool: ...

    @property
    def footprint(self) -> "Footprint | None": ...

    @property
    def halvings(self) -> int: ...

    @property
    def samples(self) -> int:
        """Samples of all steps so far, of all runs that share the engine."""

    @property
    def cost(self) -> Cost:
        """What one sample costs."""

    @property
    def fisher(self) -> Fisher: ...

    def train(self, job: TrainingJob) -> tuple[Tensor, Losses]:
        """Return new rows, and the training losses."""

    def evaluate(
        self, rows: Tensor, shard: Shard, clients: np.ndarray, wanted: Wanted = NOTHING
    ) -> Score:
        """Score `rows[i]` on the data of the shard's client `clients[i]`."""

    def forget(self) -> None:
        """Free what is kept for training on the same shards again."""


class EngineAccess:
    """Forwards to another engine what a subclass does not do itself."""

    def __init__(self, engine: RowEngine) -> None:
        self._engine = engine
        self.layout = engine.layout

    @property
    def mode(self) -> str:
        return self._engine.mode

    @property
    def reason(self) -> str:
        return self._engine.reason

    @property
    def bf16(self) -> bool:
        return self._engine.bf16

    @property
    def footprint(self) -> "Footprint | None":
        return self._engine.footprint

    @property
    def halvings(self) -> int:
        return self._engine.halvings

    @property
    def samples(self) -> int:
        return self._engine.samples

    @property
    def cost(self) -> Cost:
        return self._engine.cost

    @property
    def fisher(self) -> Fisher:
        return self._engine.fisher

    def evaluate(
        self, rows: Tensor, shard: Shard, clients: np.ndarray, wanted: Wanted = NOTHING
    ) -> Score:
        return self._engine.evaluate(rows, shard, clients, wanted)

    def forget(self) -> None:
        self._engine.forget()
