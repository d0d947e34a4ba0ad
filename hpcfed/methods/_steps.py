"""Shared by methods that act between clients' SGD steps, or weigh these."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from hpcfed import options
from hpcfed.clients.job import Recipe
from hpcfed.methods._interface import Cohort, Federation, Tensor
from hpcfed.options import Choice, RunConfig, option
from hpcfed.runtime.device import on_device


class Options(options.Options):
    """Every client takes the same number of steps."""

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


def plain_sgd(config: RunConfig, because: str) -> Iterable[Choice]:
    """Choose steps without momentum, where clients train by SGD."""
    if config.optimiser == "sgd":
        yield Choice("momentum", 0.0, f"{because}; --momentum takes others")


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
    """Return the new velocity, and the change with momentum for a plain one."""
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


def accumulated(
    fed: Federation, cohort: Cohort, recipe: Recipe, mu: float = 0.0
) -> Tensor:
    """Return ‖aᵢ‖₁, the total weight of each cohort member's steps; a step without
    momentum weighs 1.

    A client that starts at w is at w − η Σ aₖ gₖ after τ steps (Wang et al. 2020,
    Section 4). With momentum ρ, which starts from zero, the gradient of step k acts in
    all later steps: aₖ = (1 − ρ^(τ−k)) / (1 − ρ) for k = 0 … τ − 1. A term μ/2 ‖θ − w‖²
    of the loss reduces it in each later step: without momentum, aₖ = (1 − η μ)^(τ−1−k).
    """
    steps = fed.everyones_steps(cohort, recipe)
    by_age = weights_by_age(recipe, int(steps.max(initial=0)), mu)
    sums = np.concatenate([[0.0], np.cumsum(np.abs(by_age))])
    return on_device(sums[steps], fed.device)


def weights_by_age(recipe: Recipe, steps: int, mu: float) -> list[float]:
    """Return a gradient's weight in the row by age: after its step, and later ones."""
    rho, eta = recipe.momentum, recipe.lr
    velocity, weight, gradient = 0.0, 0.0, 1.0
    found = []
    for _ in range(steps):
        # The term's pull is part of the gradient; the row has moved by −η weight.
        slope = gradient - eta * mu * weight
        velocity = rho * velocity + slope
        weight += slope + rho * velocity if recipe.nesterov else velocity
        gradient = 0.0  # it acts once; afterwards only its momentum does
        found.append(weight)
    return found
