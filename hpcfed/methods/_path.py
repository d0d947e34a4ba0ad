"""What methods have in common that compute with how far a client's steps of SGD lead."""

import numpy as np

from hpcfed.clients.job import Recipe
from hpcfed.methods._interface import Cohort, Federation, Tensor
from hpcfed.runtime.device import on_device


def accumulated(
    fed: Federation, cohort: Cohort, recipe: Recipe, mu: float = 0.0
) -> Tensor:
    """Return ‖aᵢ‖₁, what the steps of each member of the cohort weigh together; one
    without momentum weighs 1.

    A client that begins at w ends its τ steps at w − η Σ aₖ gₖ (Wang et al. 2020,
    Section 4). By momentum ρ, which begins at zero, the gradient of step k comes back in
    all later ones: aₖ = (1 − ρ^(τ−k)) / (1 − ρ) for k = 0 … τ − 1. A term μ/2 ‖θ − w‖²
    of the loss takes some of it back in each of them: aₖ = (1 − η μ)^(τ−1−k) without
    momentum.
    """
    steps = fed.everyones_steps(cohort, recipe)
    by_age = weights_by_age(recipe, int(steps.max(initial=0)), mu)
    sums = np.concatenate([[0.0], np.cumsum(np.abs(by_age))])
    return on_device(sums[steps], fed.device)


def weights_by_age(recipe: Recipe, steps: int, mu: float) -> list[float]:
    """Return what a gradient weighs in the row by its age: right after its step first,
    then after every further one.
    """
    rho, eta = recipe.momentum, recipe.lr
    velocity, weight, gradient = 0.0, 0.0, 1.0
    found = []
    for _ in range(steps):
        # The pull of the term is part of the gradient. −η weight is how far the row is.
        slope = gradient - eta * mu * weight
        velocity = rho * velocity + slope
        weight += slope + rho * velocity if recipe.nesterov else velocity
        gradient = 0.0  # it comes once, and its momentum stays
        found.append(weight)
    return found
