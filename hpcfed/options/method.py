"""The options that a method adds to those of every run."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcfed.errors import UserError
from hpcfed.options.declare import Choice, Switch, flag_of
from hpcfed.options.runconfig import RunConfig
from hpcfed.options.traits import MethodTraits

if TYPE_CHECKING:  # the command line loads no torch
    from torch import Tensor

    from hpcfed.models.layout import Layout


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
    """What one client trains, as declared; the round's log counts what was done."""

    round: tuple[Training, ...]
    """In each round that it takes part in."""
    judged: tuple[Training, ...] = ()
    """In each evaluation, before its model is tested."""
    fisher: int = 0
    """Passes per round over all its samples for the Fisher information."""


def check_layers(option: str, asked: int | None, most: int, network: str) -> None:
    """Refuse an option that asks for more layers than a network has."""
    if asked is not None and asked > most:
        raise UserError(
            f"{flag_of(option)} {asked}, but {network} has {most} layers with weights"
        )


class Options(MethodTraits):
    """The options of a method; each method's file may define a class
    `Options(options.Options)`.

    That class may override the functions below. All but `local_work` do nothing here.
    """

    def fit(self, config: RunConfig, ranks: int) -> Iterable[Choice]:
        """Replace defaults that do not suit the run; values that the user gave stay."""
        return ()

    def switches(self, config: RunConfig) -> Iterable[Switch]:
        """List the method's options that act only if something else is on."""
        return ()

    def local_work(self, config: RunConfig, layout: "Layout") -> LocalWork:
        """Declare what a client trains: --epochs on its data in every round."""
        return LocalWork((Training.usual(config),))

    def check(self, config: RunConfig) -> None:
        """Refuse options of the method that do not fit the rest of the run."""

    def check_ranks(self, ranks: int) -> None:
        """Refuse a number of ranks on which the server's model cannot be trained."""

    def remarks(self, layout: "Layout", network: str) -> Iterable[str]:
        """Return lines to print when a run starts: what the user may not expect."""
        return ()

    def check_layout(self, layout: "Layout", network: str) -> None:
        """Refuse a network without the layers that the method needs."""
