"""FedNova (Wang et al. 2020): updates are divided by what each client's steps weigh: w ←
w + τ_eff Σ (nᵢ / Σn) (rowᵢ − w) / ‖aᵢ‖₁.

Without this, clients with more samples take more steps and pull w towards their own
optimum. τ_eff = Σ (nᵢ / Σn) ‖aᵢ‖₁, so that equal numbers of steps give FedAvg.
With --prox-mu clients minimise their loss + μ/2 ‖θ − w‖², as in FedProx, and aᵢ = [(1 −
η μ)^(τ−1), …, 1]. Running statistics of batch norm are averaged as they are.
"""

import torch

from hpcfed import options
from hpcfed.clients.pull import Pull, Strengths
from hpcfed.methods import fedavg
from hpcfed.methods._interface import Cohort, Federation, Tensor
from hpcfed.methods._steps import accumulated
from hpcfed.options import option
from hpcfed.runtime.device import on_device

EXTENDS = fedavg


class Options(options.Options):
    needs_sgd = True  # else the weight of a step is unknown

    prox_mu: float = option(
        0.0, "μ: how strongly w draws clients' rows; 0: not at all", ge=0
    )


def round(
    fed: Federation[Options], state: fedavg.State, cohort: Cohort
) -> fedavg.State:
    # Without a cohort there are no steps to divide by.
    if not cohort.log.cohort_size:
        return state
    w, mu = state.w, fed.options.prox_mu
    start = fed.download(w, cohort)
    pull = Pull(Strengths(squared=mu), reference=start) if mu else None
    rows = fed.train(start, cohort, pull=pull)
    rows = fed.upload(rows, cohort)
    rows, cohort = fed.arrived(rows, cohort)
    weight = accumulated(fed, cohort, fed.recipe(cohort.round), mu)
    here = on_device(cohort.chosen, w.device)
    tau_eff = _mean_of_finite(fed, weight, rows, cohort, here)
    factor = (tau_eff / weight)[here].to(w.dtype)
    # w + τ_eff (rowᵢ − w) / ‖aᵢ‖₁
    # lerp also takes factors above 1, for clients with few steps.
    normalised = torch.lerp(w, rows, factor[:, None])
    statistics = slice(fed.layout.num_parameters, None)
    normalised[:, statistics] = rows[:, statistics]
    return fedavg.State(fed.mean(normalised, cohort))


def _mean_of_finite(
    fed: Federation, numbers: Tensor, rows: Tensor, cohort: Cohort, here: Tensor
) -> Tensor:
    """Return the weighted mean of a number per member, without members whose rows are
    not finite: the mean of rows leaves these out, too.
    """
    finite = numbers.new_zeros(len(numbers))
    finite[here] = rows.isfinite().all(1).to(finite.dtype)
    finite = fed.sum(finite)
    shares = numbers.new_tensor(cohort.weights) * finite
    # Shares of all members add up to 1 already, up to a rounding error.
    total = shares.sum().where(~finite.all(), 1)
    return shares @ numbers / total
