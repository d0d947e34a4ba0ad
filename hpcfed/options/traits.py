"""What the checks of a run need to know about its method."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from hpcfed.options.declare import OptionGroup, facts_of


class MethodTraits(OptionGroup):
    """Facts about a method that decide which options of a run can act."""

    has_server: ClassVar[bool] = False
    """Whether the method trains a model on the server, which may have its own ranks."""
    uploads: ClassVar[bool] = True
    """Whether clients upload anything, so that attackers can forge it."""
    averages: ClassVar[bool] = True
    """Whether the method takes the mean of uploads, so that a robust rule can replace
    it.
    """
    weighs: ClassVar[Literal["samples", "uniform"]] = "samples"
    """What clients weigh by in the method's means, unless --weights says otherwise."""
    whole_rows: ClassVar[bool] = True
    """Whether uploads have all columns of a row, so that matrices can be found in them.
    Which of them a client sends may be its own choice.
    """
    private_mean: ClassVar[bool] = False
    """How files of older versions promise what PRIVATE_MEAN does today."""
    all_train: ClassVar[bool] = False
    """Whether clients also train in rounds for which they were not sampled."""
    asynchronous: ClassVar[bool] = False
    """Whether clients train at their own pace, on a timetable of the method's: then no
    clock closes rounds.
    """
    divides_training: ClassVar[bool] = True
    """Whether a client's local training may end after any of its steps, as --partial
    lets it.
    """
    names_layers: ClassVar[bool] = False
    """Whether the method names layers that a network may lack; `check_layout` then
    judges the network.
    """
    needs_sgd: ClassVar[bool] = False
    """Whether the method computes with clients' steps, so that they must be those of SGD
    at one rate throughout a round.
    """

    def replaced(self) -> Mapping[str, str]:
        """Return options of local training, each with the method's own option that
        replaces it; fewer if the method's options ask for fewer.
        """
        found: dict[str, str] = {}
        for own, field in type(self).model_fields.items():
            found |= dict.fromkeys(facts_of(field).replaces, own)
        return found
