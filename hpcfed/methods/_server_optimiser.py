"""Shared by methods whose server treats the clients' mean update as a gradient, and
moves the global row by its own optimiser.

Reddi et al. 2021, Algorithm 2: Δ = Σ weightᵢ (rowᵢ − w) is the pseudo-gradient. Running
statistics of batch norm are not parameters: they are averaged as in FedAvg.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hpcfed.methods import _server_rate, fedavg
from hpcfed.methods._interface import Cohort, Federation, Tensor
from hpcfed.methods._server_rate import server_rate
from hpcfed.options import option

EXTENDS = fedavg

SecondMoment = Callable[[Tensor, Tensor], Tensor]
"""Takes v and Δ², and returns the next v."""


class Options(_server_rate.Options):
    """Options of the methods that adapt the rate of every column."""

    server_lr: float = option(0.03, "η, the server's learning rate", gt=0)
    server_momentum: float = option(
        0.9,
        "β₁: what the server's momentum keeps of its past",
        ge=0,
        lt=1,
        also="server_beta1",
    )
    server_tau: float = option(
        1e-3, "τ, added to √v: the larger, the less the rates adapt", gt=0, also="tau"
    )


@dataclass(frozen=True)
class State(fedavg.State):
    m: Tensor
    """The momentum, of every parameter."""
    v: Tensor
    """The mean or the sum of Δ², of every parameter."""


def init(fed: Federation[Options]) -> State:
    w = fed.initial_row()
    m = w.new_zeros(fed.layout.num_parameters)
    # Algorithm 2 asks for v ≥ τ² at the start.
    v = m + fed.options.server_tau**2
    return State(w, m, v)


def adaptive_round(
    fed: Federation[Options],
    state: State,
    cohort: Cohort,
    *,
    second_moment: SecondMoment,
) -> State:
    """Run a round of Algorithm 2; methods differ only in `second_moment`."""
    # Without uploads there is no step to take.
    if not fed.hears(cohort):
        return state
    mean = mean_row(fed, state.w, cohort)
    delta = (mean - state.w)[: len(state.m)]
    beta, tau = fed.options.server_momentum, fed.options.server_tau
    m = beta * state.m + (1 - beta) * delta
    v = second_moment(state.v, delta.square())
    rate = server_rate(fed, cohort.round)
    # Without Adam's bias correction, as in Algorithm 2.
    step = rate * m / (v.sqrt() + tau)
    return State(moved(state.w, step, mean), m, v)


def mean_row(fed: Federation, w: Tensor, cohort: Cohort) -> Tensor:
    """Train the cohort from w, and return the mean Σ weightᵢ rowᵢ.

    The mean minus w is Δ, because the weights sum to one.
    """
    rows = fed.download(w, cohort)
    rows = fed.train(rows, cohort)
    rows = fed.upload(rows, cohort)
    return fed.mean(rows, cohort)


def moved(w: Tensor, step: Tensor, mean: Tensor) -> Tensor:
    """Return w with parameters moved by `step`, and running statistics of `mean`."""
    num_parameters = len(step)
    return torch.cat([w[:num_parameters] + step, mean[num_parameters:]])
