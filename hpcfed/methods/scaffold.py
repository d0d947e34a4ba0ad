"""SCAFFOLD (Karimireddy et al. 2020): control variates cᵢ and c take clients' drift out
of every step: θ ← θ − η (g − cᵢ + c).

Algorithm 1 with option II: cᵢ⁺ = cᵢ − c + (w − rowᵢ) / (K η), which is the mean of the
client's gradients along its K steps. The paper has no formula for momentum. With
momentum, ‖aᵢ‖₁ replaces K as in FedNova: cᵢ⁺ is then the weighted mean of the
gradients, and plain SGD gives the paper's formula. Then w ← w + η_g Σ weightᵢ (rowᵢ −
w), and c stays Σ (nᵢ / Σn) cᵢ over all clients. Weights are by samples as in FedAvg, so
that both minimise the same objective; --weights uniform gives the paper's 1 / |S| and 1
/ N.

--variates gradient is option I: cᵢ⁺ = ∇fᵢ(w) over all data of the client, which takes
one more pass over the data.

As in the paper, all clients take K steps. To train for --epochs is an option, but then
large clients easily go too far. With both options a client sends a row and a control
variate: twice the traffic of FedAvg. Running statistics of batch norm have no control
variate.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from hpcfed.clients.job import Recipe
from hpcfed.methods import IN_PLACE, OWNED, _server_optimiser, fedavg
from hpcfed.methods._interface import Cohort, Federation, Layout, Tensor
from hpcfed.methods._server_optimiser import moved, server_rate
from hpcfed.methods._steps import accumulated, plain_sgd
from hpcfed.options import Choice, LocalWork, RunConfig, Switch, Training, option

EXTENDS = fedavg


class Options(_server_optimiser.RateOptions):
    needs_sgd = True

    local_steps: int = option(
        10,
        "K: local steps of a client in a round; 0: as many as --epochs takes",
        ge=0,
        le=100_000,
    )

    variates: Literal["steps", "gradient"] = option(
        "steps",
        "cᵢ⁺: steps, the mean gradient along the local steps (the paper's option II); "
        "gradient, that of all local data at w (option I)",
    )

    def fit(self, config: RunConfig, ranks: int) -> Iterable[Choice]:
        # Measured on digits, Dirichlet 0.1: with momentum 0.9 nothing is learnt, because
        # variates are one round old and K η must stay below one.
        return plain_sgd(config, "scaffold's control variates are for plain SGD")

    def switches(self, config: RunConfig) -> Iterable[Switch]:
        yield from super().switches(config)
        acts = not self.local_steps or config.new_clients > 0
        yield Switch("epochs", "--local-steps 0", acts)

    def local_work(self, config: RunConfig, layout: Layout) -> LocalWork:
        trained = Training.usual(config)
        if self.local_steps:
            trained = Training(config.batch_size, steps=self.local_steps)
        if self.variates == "steps":
            return LocalWork((trained,))
        # Option I needs one more pass over all local data, for its gradient.
        return LocalWork((trained, Training.usual(config, epochs=1)))


@dataclass(frozen=True)
class State(fedavg.State):
    c: Tensor
    """The server's control variate, 0 for running statistics."""
    own: Tensor = field(metadata=OWNED | IN_PLACE)
    """cᵢ of every client."""


def init(fed: Federation[Options]) -> State:
    w = fed.initial_row()
    zeros = w.new_zeros(len(fed.clients), len(w))
    return State(w, c=w.new_zeros(len(w)), own=zeros)


def round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    # Without a cohort there are no steps to divide by.
    if not cohort.log.cohort_size:
        return state
    recipe, num_parameters = _recipe(fed, cohort), fed.layout.num_parameters
    c = fed.download(state.c, cohort, beside="variates")
    w = fed.download(state.w, cohort)
    own = state.own[cohort.here]
    rows = fed.train(w, cohort, recipe=recipe, correction=c - own)

    # `directions` is the mean of g − cᵢ + c over a client's steps. For a client that
    # has diverged, c takes its place, so that the client changes nothing.
    if fed.options.variates == "gradient":
        # Option I has cᵢ⁺ in place of the mean of g; --weight-decay is a part of fᵢ.
        gradients = fed.gradients(w, cohort, phase=1, whole=True)
        directions = gradients + recipe.weight_decay * w - own + c
    else:
        path = recipe.lr * accumulated(fed, cohort, recipe)[cohort.chosen, None]
        directions = (w - rows) / path.to(w.dtype)
    directions[:, num_parameters:] = 0
    directions = fed.revert_diverged(directions, c, cohort)

    rows = fed.upload(rows, cohort)
    # The paper's clients send cᵢ⁺ − cᵢ, which is `directions` minus the c they got.
    sent = fed.upload(directions, cohort, beside="variates")
    # cᵢ⁺; with option II it is cᵢ − c + (w − rowᵢ) / (K η). A client that uploads too
    # late keeps its old variate, because c must stay the mean of all.
    variates, _ = fed.arrived(own + (directions - c), cohort)
    sent, _ = fed.arrived(sent, cohort)
    rows, cohort = fed.arrived(rows, cohort)
    state.own[cohort.here] = variates
    mean = fed.mean(rows, cohort)
    step = server_rate(fed, cohort.round) * (mean - state.w)[:num_parameters]
    # The weighted form of the paper's |S| / N: only the cohort's variates have changed.
    change = fed.weight_of(cohort) * (fed.mean(sent, cohort) - state.c)
    return State(moved(state.w, step, mean), state.c + change, state.own)


def _recipe(fed: Federation[Options], cohort: Cohort) -> Recipe:
    recipe = fed.recipe(cohort.round)
    steps = fed.options.local_steps
    return replace(recipe, epochs=0, steps=steps) if steps else recipe
