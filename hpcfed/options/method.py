"""The options that a method adds to those of every run."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hpcfed.options.declare import Choice, Switch
from hpcfed.options.runconfig import RunConfig
from hpcfed.options.traits import MethodTraits
from hpcfed.options.work import LocalWork, Training

if TYPE_CHECKING:  # a layout is made of tensors, and the command line loads no torch
    from hpcfed.models.layout import Layout


class Options(MethodTraits):
    """The flags of a method; each method's file may have a class
    `Options(options.Options)`.

    The functions below are for it to override: but for `local_work` none of them does
    anything here.
    """

    def fit(self, config: RunConfig, ranks: int) -> Iterable[Choice]:
        """Name defaults that do not suit the run on so many ranks, and what does.

        Values that the user gave stay as they are.
        """
        return ()

    def switches(self, config: RunConfig) -> Iterable[Switch]:
        """Name the method's options that act only where something else is on."""
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
        """Return lines that a run begins with: what the user may not expect."""
        return ()

    def check_layout(self, layout: "Layout", network: str) -> None:
        """Refuse a network without the layers that the method needs."""
