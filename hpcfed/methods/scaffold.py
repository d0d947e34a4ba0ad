"""SCAFFOLD (Karimireddy et al. 2020): control variates cᵢ and c take clients' drift out
of every step: θ ← θ − η (g − cᵢ + c).

Algorithm 1 with option II: cᵢ⁺ = cᵢ − c + (w − rowᵢ) / (K η), which is the mean of the
client's gradients along its K steps. With momentum, for which the paper has no formula,
steps weigh ‖aᵢ‖₁ in place of K as in FedNova: so it is their weighted mean, and plain
SGD gives the paper's. Then w ← w + η_g Σ weightᵢ (rowᵢ − w), and c stays Σ (nᵢ / Σn) cᵢ
over all clients: by samples as in FedAvg, so that both minimise the same objective. The
paper's 1 / |S| and 1 / N are --weights uniform.

With --variates gradient it is option I: cᵢ⁺ = ∇fᵢ(w), over all data of the client, which
takes another pass over it.

As in the paper all clients take K steps; as many as --epochs asks for is an option, with
which large clients easily go too far. Both ways a client sends a row and a control
variate: twice the traffic of FedAvg. Running statistics of batch norm have no control
variate.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from hpcfed.clients.job import Recipe
from hpcfed.methods import _server_rate, fedavg
from hpcfed.methods._interface import (
    IN_PLACE,
    OWNED,
    Cohort,
    Federation,
    Layout,
    Tensor,
)
from hpcfed.methods._path import accumulated
from hpcfed.methods._server_optimiser import moved
from hpcfed.methods._server_rate import server_rate
from hpcfed.options import Choice, LocalWork, RunConfig, Switch, Training, option

EXTENDS = fedavg


class Options(_server_rate.Options):
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
        # variates are a round old and K η must stay below one.
        if config.optimiser == "sgd":
            yield Choice(
                "momentum",
                0.0,
                "scaffold's control variates are for plain SGD; --momentum takes others",
            )

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
        # Option I goes through all local data once more, for its gradient.
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
    # Nobody has taken a step to divide by.
    if not cohort.log.cohort_size:
        return state
    recipe, num_parameters = _recipe(fed, cohort), fed.layout.num_parameters
    c = fed.download(state.c, cohort, beside="variates")
    w = fed.download(state.w, cohort)
    own = state.own[cohort.here]
    rows = fed.train(w, cohort, recipe=recipe, correction=c - own)

    # The mean of g − cᵢ + c over a client's steps. With c in its place, one that has
    # diverged changes nothing.
    if fed.options.variates == "gradient":
        # Option I: cᵢ⁺ in its place; --weight-decay is a part of fᵢ.
        gradients = fed.gradients(w, cohort, phase=1, whole=True)
        directions = gradients + recipe.weight_decay * w - own + c
    else:
        path = recipe.lr * accumulated(fed, cohort, recipe)[cohort.chosen, None]
        directions = (w - rows) / path.to(w.dtype)
    directions[:, num_parameters:] = 0
    directions = fed.revert_diverged(directions, c, cohort)

    rows = fed.upload(rows, cohort)
    # The paper's clients send cᵢ⁺ − cᵢ, which is this less the c that they were sent.
    sent = fed.upload(directions, cohort, beside="variates")
    # cᵢ⁺; by option II cᵢ − c + (w − rowᵢ) / (K η). A client that comes late keeps its
    # variate, for c is the mean of all.
    variates, _ = fed.arrived(own + (directions - c), cohort)
    sent, _ = fed.arrived(sent, cohort)
    rows, cohort = fed.arrived(rows, cohort)
    state.own[cohort.here] = variates
    mean = fed.mean(rows, cohort)
    step = server_rate(fed, cohort.round) * (mean - state.w)[:num_parameters]
    # The paper's |S| / N, by weights: only the cohort has changed its variates.
    change = fed.weight_of(cohort) * (fed.mean(sent, cohort) - state.c)
    return State(moved(state.w, step, mean), state.c + change, state.own)


def _recipe(fed: Federation[Options], cohort: Cohort) -> Recipe:
    recipe = fed.recipe(cohort.round)
    steps = fed.options.local_steps
    return replace(recipe, epochs=0, steps=steps) if steps else recipe
