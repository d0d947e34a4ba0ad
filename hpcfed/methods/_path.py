"""What methods have in common that compute with how far a client's steps of SGD lead."""

from typing import TYPE_CHECKING

from hpcfed.methods._interface import Cohort, Federation, Tensor

if TYPE_CHECKING:
    from hpcfed.clients.job import Recipe


def accumulated(fed: Federation, cohort: Cohort, recipe: "Recipe") -> Tensor:
    """Return ‖aᵢ‖₁, what the steps of each member of the cohort weigh together; one
    without momentum weighs 1.

    A client that begins at w ends its τ steps at w − η Σ aₖ gₖ. By momentum ρ, which
    begins at zero, the gradient of step k comes back in all later ones: aₖ = (1 −
    ρ^(τ−k)) / (1 − ρ) for k = 0 … τ − 1 (Wang et al. 2020, Section 4).
    """
    from hpcfed.runtime.device import on_device

    steps = fed.everyones_steps(cohort, recipe)
    rho = recipe.momentum
    # The sum of the series above.
    weights = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
    return on_device(weights, fed.device)
