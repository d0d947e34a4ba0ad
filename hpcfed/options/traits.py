"""What the checks of a run need to know about its method."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from hpcfed.options.declare import OptionGroup, facts_of


class MethodTraits(OptionGroup):
    """Facts about a method that decide which options of a run can act."""

    has_server: ClassVar[bool] = False
    """Whether the method trains a model on the server, which may have its own ranks."""
    uploads: ClassVar[bool] = True
    """Whether clients upload anything, so that attackers can forge it."""
    averages: ClassVar[bool] = True
    """Whether it takes the mean of uploads, which a robust rule can replace."""
    weighs: ClassVar[Literal["samples", "uniform"]] = "samples"
    """What clients weigh by in the method's means, unless --weights says otherwise."""
    whole_rows: ClassVar[bool] = True
    """Whether an upload is laid out as a whole row, so that the layers' matrices can be
    found in it. A client may still choose to send only some of its columns.
    """
    private_mean: ClassVar[bool] = False
    """Set by files for older versions; new files define PRIVATE_MEAN instead."""
    unsampled_train: ClassVar[bool] = False
    """Whether clients also train for the rounds for which they were not sampled. A
    round computes that for its cohort alone, later: see `fedumf`.
    """
    asynchronous: ClassVar[bool] = False
    """Whether clients train at their own pace, and the clock does not close rounds."""
    divides_training: ClassVar[bool] = True
    """Whether local training may stop after any step, as --partial needs."""
    names_layers: ClassVar[bool] = False
    """Whether it names layers, which `check_layout` then looks for in the network."""
    needs_sgd: ClassVar[bool] = False
    """Whether its formulas assume local steps of SGD at one rate in a round."""

    def replaced(self) -> Mapping[str, str]:
        """Map options of local training to the method's options that replace them.

        A method may override this if its options turn the replacement off.
        """
        found: dict[str, str] = {}
        for own, field in type(self).model_fields.items():
            found |= dict.fromkeys(facts_of(field).replaces, own)
        return found


@dataclass(frozen=True)
class Promises:
    """What the round of a method promises; privacy and sign votes rely on it.

    They are constants in the method's file. `hpcfed.methods` imports this package, so
    it passes them in by `ask_methods`.
    """

    private_mean: bool = False
    """The server sends one row to all clients, and learns nothing of their uploads but
    one mean of rows. Then noise on the mean hides each upload.
    """
    votes: bool = False
    """A majority of signs can replace that mean: all clients start from one row."""


PromisesOf = Callable[[str], Promises]
promising: list[PromisesOf] = []


def promises_of(method: str) -> Promises:
    """Return what the round of a method promises, by its name."""
    return promising[0](method) if promising else Promises()
