"""What methods have in common whose clients do something between two steps of SGD, the
same number of steps for every client.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from hpcfed import config
from hpcfed.config import option
from hpcfed.methods._interface import Federation, Tensor

if TYPE_CHECKING:
    from hpcfed.clients.job import Recipe


class Options(config.Options):
    needs_sgd = True
    divides_training = False  # momentum goes from step to step
    trains_by: ClassVar[Mapping[str, str]] = {"epochs": "local_steps"}

    local_steps: int = option(
        10, "τ: local steps of a client in a round", ge=1, le=100_000
    )


def one_step(fed: Federation, lr: float | None = None) -> "Recipe":
    """Return the run's recipe for a single step; `lr` may replace its learning rate."""
    recipe = fed.recipe(fed.round)
    # Momentum goes from step to step, so the method has to carry it on.
    return replace(
        recipe, epochs=0, steps=1, momentum=0.0, lr=recipe.lr if lr is None else lr
    )


def stepped(fed: Federation, rows: Tensor, velocity: Tensor, trained: Tensor) -> Tensor:
    """Return rows + velocity, with the running statistics of rows just trained."""
    moved = rows + velocity
    statistics = slice(fed.layout.num_parameters, None)
    moved[:, statistics] = trained[:, statistics]
    return moved
