"""Shared by methods that compute how far a client's SGD steps move its row."""

import numpy as np

from hpcfed.clients.job import Recipe
from hpcfed.methods._interface import Cohort, Federation, Tensor
from hpcfed.runtime.device import on_device


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
