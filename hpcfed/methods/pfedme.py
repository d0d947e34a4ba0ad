"""pFedMe (T Dinh et al. 2020): a client's personal row is the optimum θ̃ of its loss + λ/2
‖θ − wᵢ‖², and wᵢ follows it: wᵢ ← wᵢ − η λ (wᵢ − θ̃).

Algorithm 1: in each of R local rounds a sampled client takes a minibatch, approaches θ̃
by K steps of SGD on it, and moves wᵢ. The steps start from the θ̃ of the local round
before, at first from w. Then w ← (1 − β) w + β Σ weightᵢ wᵢ. The learning rate of the K
steps is --lr. Clients are evaluated with their last θ̃.

Defaults are those of the paper's table of tuned parameters for MNIST in the strongly
convex case: λ = 15, η = 0.01, β = 2, K = 5, R = 20. With these wᵢ moves λ η = 15 % of
the way to θ̃ in a local round; with λ η = 1 it would become θ̃. The paper runs 800
rounds.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

from hpcfed import options
from hpcfed.clients.pull import Pull, Strengths
from hpcfed.methods import IN_PLACE, OWNED, fedavg
from hpcfed.methods._interface import Cohort, Federation, Layout, Positions, Tensor
from hpcfed.methods._server_optimiser import moved
from hpcfed.methods._steps import plain_sgd
from hpcfed.options import Choice, LocalWork, RunConfig, Training, option

EXTENDS = fedavg
PRIVATE_MEAN = True


class Options(options.Options):
    divides_training = False  # a client's row moves towards its θ̃ between trainings
    pfedme_lambda: float = option(
        15.0, "λ: how strongly a client's row draws its personal one", gt=0
    )
    pfedme_lr: float = option(0.01, "η, the rate at which a client's row follows", gt=0)
    pfedme_steps: int = option(
        5, "K: steps towards the personal row on a minibatch", ge=1, le=100_000
    )
    pfedme_beta: float = option(
        2.0, "β: how far the server goes towards the mean", gt=0
    )
    local_rounds: int = option(
        20,
        "R: minibatches of a client in a round",
        ge=1,
        le=100_000,
        also="R",
        replaces="epochs",
    )

    def local_work(self, config: RunConfig, layout: Layout) -> LocalWork:
        steps = self.pfedme_steps
        times = self.local_rounds
        one = Training(config.batch_size, steps=steps, repeat=steps, times=times)
        return LocalWork((one,))

    def fit(self, config: RunConfig, ranks: int) -> Iterable[Choice]:
        # A few steps with large momentum overshoot the optimum.
        return plain_sgd(config, "a few plain steps find pfedme's personal rows")


@dataclass(frozen=True)
class State(fedavg.State):
    theta: Tensor = field(metadata=OWNED | IN_PLACE)
    """θ̃ of every client."""


def init(fed: Federation[Options]) -> State:
    w = fed.initial_row()
    return State(w, theta=w.repeat(len(fed.clients), 1))


def round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    # A client without data has no θ̃ of its own.
    if not fed.hears(cohort):
        return state
    options, statistics = fed.options, fed.layout.num_parameters
    steps = options.pfedme_steps
    # K steps on one minibatch.
    recipe = replace(fed.recipe(cohort.round), epochs=0, steps=steps, repeat=steps)
    strengths = Strengths(squared=options.pfedme_lambda)
    rate = options.pfedme_lr * options.pfedme_lambda
    rows = theta = fed.download(state.w, cohort)
    for local_round in range(options.local_rounds):
        theta = fed.train(
            theta,
            cohort,
            recipe=recipe,
            pull=Pull(strengths, reference=rows),
            phase=local_round,
            final=False,
        )
        # wᵢ − η λ (wᵢ − θ̃); running statistics follow at once.
        rows = torch.lerp(rows, theta, rate)
        rows[:, statistics:] = theta[:, statistics:]
    fed.finish(rows, cohort)
    before = state.theta[cohort.here]
    state.theta[cohort.here] = fed.revert_diverged(theta, before, cohort)

    rows = fed.upload(rows, cohort)
    mean = fed.mean(rows, cohort)
    step = options.pfedme_beta * (mean - state.w)[:statistics]
    return State(moved(state.w, step, mean), state.theta)


def personal(fed: Federation[Options], state: State, clients: Positions) -> Tensor:
    return state.theta[clients]
