"""The options that a method adds to those of every run."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hpcfed.options.declare import Choice, Switch
from hpcfed.options.runconfig import RunConfig
from hpcfed.options.traits import MethodTraits
from hpcfed.options.work import LocalWork, Training

if TYPE_CHECKING:  # a layout holds tensors, and the command line must not import torch
    from hpcfed.models.layout import Layout


class Options(MethodTraits):
    """The options of a method; each method's file may define a class
    `Options(options.Options)`.

    That class may override the functions below. All but `local_work` do nothing here.
    """

    def fit(self, config: RunConfig, ranks: int) -> Iterable[Choice]:
        """Replace defaults that do not suit the run on this number of ranks.

        Values that the user gave stay.
        """
        return ()

    def switches(self, config: RunConfig) -> Iterable[Switch]:
        """List the method's options that act only if something else is on."""
        return ()

    def local_work(self, config: RunConfig, layout: "Layout") -> LocalWork:
        """Declare what a client trains, for plans and dry runs: --epochs on its data in
        every round, unless the method does otherwise.
        """
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
