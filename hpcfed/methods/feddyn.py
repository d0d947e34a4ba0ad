"""FedDyn (Acar et al. 2021): each client's loss has a linear term and α/2 ‖θ − w‖², so
that its optimum becomes that of all clients: w ← Σ weightᵢ rowᵢ − h / α.

Algorithm 1: gᵢ stands for ∇Lᵢ at the row where client i last ended. The client
minimises Lᵢ(θ) − ⟨gᵢ, θ⟩ + α/2 ‖θ − w‖², then sets gᵢ ← gᵢ − α (rowᵢ − w). The server's
h is the mean of all gᵢ: h ← h − α Σ (nᵢ / Σn) (rowᵢ − w) over the cohort. Here clients
are weighted by samples, as in FedAvg, so that both minimise the same objective;
--weights uniform gives the paper's sums. Running statistics of batch norm are averaged.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from hpcfed import options
from hpcfed.clients.pull import Pull, Strengths
from hpcfed.methods import fedavg
from hpcfed.methods._interface import IN_PLACE, OWNED, Cohort, Federation, Tensor
from hpcfed.methods._steps import plain_sgd
from hpcfed.options import Choice, RunConfig, option

EXTENDS = fedavg


class Options(options.Options):
    dyn_alpha: float = option(
        0.1,
        "α: how strongly w draws rows, and h follows them",
        gt=0,
        also="alpha_coef feddyn_alpha",
    )

    def fit(self, config: RunConfig, ranks: int) -> Iterable[Choice]:
        # Measured on digits, Dirichlet 0.1: with momentum 0.9 FedDyn learns for twenty
        # rounds, and then forgets it again.
        return plain_sgd(config, "feddyn's linear terms bear small steps only")


@dataclass(frozen=True)
class State(fedavg.State):
    h: Tensor
    """The mean of all gᵢ, 0 for running statistics."""
    own: Tensor = field(metadata=OWNED | IN_PLACE)
    """gᵢ of every client."""


def init(fed: Federation[Options]) -> State:
    w = fed.initial_row()
    zeros = w.new_zeros(len(fed.clients), len(w))
    return State(w, h=w.new_zeros(len(w)), own=zeros)


def round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    # Without a cohort, h would still move w.
    if not cohort.log.cohort_size:
        return state
    alpha, statistics = fed.options.dyn_alpha, fed.layout.num_parameters
    w = fed.download(state.w, cohort)
    own = state.own[cohort.here]
    pull = Pull(Strengths(squared=alpha), reference=w)
    # The gradient of −⟨gᵢ, θ⟩ is −gᵢ.
    rows = fed.train(w, cohort, pull=pull, correction=-own)

    gradients = own - alpha * (rows - w)
    gradients[:, statistics:] = 0
    # A client that has diverged keeps its old gᵢ.
    gradients = fed.revert_diverged(gradients, own, cohort)

    rows = fed.upload(rows, cohort)
    # So does a client that uploads too late: h must stay the mean of all gᵢ.
    gradients, _ = fed.arrived(gradients, cohort)
    rows, cohort = fed.arrived(rows, cohort)
    state.own[cohort.here] = gradients
    mean = fed.mean(rows, cohort)
    # The mean over the cohort times its share is the mean over all clients, where
    # others have not moved.
    share = _share_heard(fed, cohort).to(mean.dtype)
    h = state.h - alpha * share * (mean - state.w)
    h[statistics:] = 0
    return State(mean - h / alpha, h, state.own)


def _share_heard(fed: Federation, cohort: Cohort) -> Tensor:
    """Return the cohort's share of the weight of all clients, without excluded ones."""
    here = cohort.clients[cohort.chosen]
    heard = np.setdiff1d(here, list(cohort.log.excluded))
    # float64 sums of whole numbers are exact: the result is the same on any number of
    # ranks.
    weight = torch.tensor(
        float(fed.weights[heard].sum()), dtype=torch.float64, device=fed.device
    )
    return fed.sum(weight) / float(fed.weights.sum())
