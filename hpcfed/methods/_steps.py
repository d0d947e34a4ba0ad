"""Shared by methods whose clients do something between SGD steps. Every client takes
the same number of steps.
"""

from dataclasses import replace

from hpcfed import options
from hpcfed.clients.job import Recipe
from hpcfed.methods._interface import Federation, Tensor
from hpcfed.options import option


class Options(options.Options):
    needs_sgd = True
    divides_training = False  # the method carries momentum from step to step
    local_steps: int = option(
        10,
        "τ: local steps of a client in a round",
        ge=1,
        le=100_000,
        also="num_local_steps max_steps",
        replaces="epochs",
    )


def one_step(fed: Federation, lr: float | None = None) -> Recipe:
    """Return the run's recipe for a single step, with learning rate `lr` if given."""
    recipe = fed.recipe(fed.round)
    # Each call would start momentum from zero, so the method carries it (`followed`).
    return replace(
        recipe, epochs=0, steps=1, momentum=0.0, lr=recipe.lr if lr is None else lr
    )


def followed(
    fed: Federation, velocity: Tensor, change: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the new velocity, and the change with momentum in place of `change`, which
    is that of a plain SGD step.
    """
    momentum = fed.config.momentum
    velocity = momentum * velocity + change
    if fed.config.nesterov:
        return velocity, change + momentum * velocity
    return velocity, velocity


def stepped(fed: Federation, rows: Tensor, change: Tensor, trained: Tensor) -> Tensor:
    """Return rows + change, with the running statistics of `trained`."""
    moved = rows + change
    statistics = slice(fed.layout.num_parameters, None)
    moved[:, statistics] = trained[:, statistics]
    return moved
