"""FedNova (Wang et al. 2020): updates are divided by what each client's steps weigh: w ←
w + τ_eff Σ (nᵢ / Σn) (rowᵢ − w) / ‖aᵢ‖₁.

Without it clients with more samples, which take more steps, pull w towards their own
optimum. τ_eff = Σ (nᵢ / Σn) ‖aᵢ‖₁, so that equally many steps everywhere give FedAvg.
Running statistics of batch norm are averaged as they are.
"""

from hpcfed import config
from hpcfed.methods import fedavg
from hpcfed.methods._interface import Cohort, Federation
from hpcfed.methods._path import accumulated

EXTENDS = fedavg


class Options(config.Options):
    needs_sgd = True  # to know what steps weigh


def round(fed: Federation, state: fedavg.State, cohort: Cohort) -> fedavg.State:
    import torch

    # Nobody has taken a step to divide by.
    if not cohort.log.cohort_size:
        return state
    w = state.w
    rows = fed.download(w, cohort)
    rows = fed.train(rows, cohort)
    rows = fed.upload(rows, cohort)
    rows, cohort = fed.arrived(rows, cohort)
    weight = accumulated(fed, cohort, fed.recipe(cohort.round))
    tau_eff = weight.new_tensor(cohort.weights) @ weight
    factor = (tau_eff / weight)[cohort.chosen].to(w.dtype)
    # w + τ_eff (rowᵢ − w) / ‖aᵢ‖₁
    normalised = torch.lerp(w, rows, factor[:, None])
    statistics = slice(fed.layout.num_parameters, None)
    normalised[:, statistics] = rows[:, statistics]
    return fedavg.State(fed.mean(normalised, cohort))
