"""What a method's clients train, as its options declare it: plans and dry runs count it
before anything runs. What was trained is counted in the round's log.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcfed.options.runconfig import RunConfig

if TYPE_CHECKING:  # the command line loads no torch
    from torch import Tensor


@dataclass(frozen=True)
class Training:
    """A training of one client on its own data."""

    batch_size: int
    epochs: int = 0
    steps: int = 0
    """So many in place of epochs."""
    repeat: int = 1
    """Steps in a row on the same minibatch."""
    times: int = 1
    """How often a client trains so, from a first minibatch on each time."""
    columns: "Tensor | None" = None
    """The columns of a row that it trains; None: all."""

    @classmethod
    def usual(cls, config: RunConfig, epochs: int | None = None) -> "Training":
        """Return a training by the run's options; `epochs` may replace theirs."""
        return cls(config.batch_size, config.epochs if epochs is None else epochs)


@dataclass(frozen=True)
class LocalWork:
    """What one client trains."""

    round: tuple[Training, ...]
    """In a round in which it takes part."""
    judged: tuple[Training, ...] = ()
    """Within an evaluation, before it is judged."""
    fisher: int = 0
    """Passes over all its samples in a round for the Fisher information, forward and
    back as in training.
    """
