"""Local work that a method's options declare in advance, for plans and dry runs. The
round's log counts what was really trained.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcfed.options.runconfig import RunConfig

if TYPE_CHECKING:  # the command line loads no torch
    from torch import Tensor


@dataclass(frozen=True)
class Training:
    """One local training of a client on its own data."""

    batch_size: int
    epochs: int = 0
    steps: int = 0
    """The number of steps, in place of epochs."""
    repeat: int = 1
    """Steps in a row on the same minibatch."""
    times: int = 1
    """How often a client repeats this, each time from the first minibatch."""
    columns: "Tensor | None" = None
    """The columns of a row that are trained; None: all."""

    @classmethod
    def usual(cls, config: RunConfig, epochs: int | None = None) -> "Training":
        """Return a training by the run's options; `epochs` overrides theirs."""
        return cls(config.batch_size, config.epochs if epochs is None else epochs)


@dataclass(frozen=True)
class LocalWork:
    """What one client trains."""

    round: tuple[Training, ...]
    """In each round that it takes part in."""
    judged: tuple[Training, ...] = ()
    """In each evaluation, before its model is tested."""
    fisher: int = 0
    """Passes over all its samples per round for the Fisher information, forward and
    backward as in training.
    """
