"""FedAvgM (Hsu et al. 2019): the server has momentum: v ← β v + Δ, w ← w + η v with Δ =
Σ weightᵢ (rowᵢ − w).

Running statistics of batch norm are averaged: only parameters have momentum. The
default η and β are smaller than the paper's 1 and 0.9, because here clients have
momentum, too.
"""

from dataclasses import dataclass

from hpcfed.methods import _server_optimiser, fedavg
from hpcfed.methods._interface import Cohort, Federation, Tensor
from hpcfed.methods._server_optimiser import mean_row, moved, server_rate
from hpcfed.options import option

EXTENDS = fedavg
PRIVATE_MEAN = True


class Options(_server_optimiser.RateOptions):
    server_lr: float = option(0.5, "η, the server's learning rate", gt=0)
    server_momentum: float = option(
        0.7, "β: what the server's momentum keeps of its past", ge=0, lt=1
    )


@dataclass(frozen=True)
class State(fedavg.State):
    velocity: Tensor
    """The server's momentum, of every parameter."""


def init(fed: Federation[Options]) -> State:
    w = fed.initial_row()
    return State(w, velocity=w.new_zeros(fed.layout.num_parameters))


def round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    # Without uploads there is no step to take.
    if not fed.hears(cohort):
        return state
    mean = mean_row(fed, state.w, cohort)
    delta = (mean - state.w)[: len(state.velocity)]
    velocity = fed.options.server_momentum * state.velocity + delta
    step = server_rate(fed, cohort.round) * velocity
    return State(moved(state.w, step, mean), velocity)
