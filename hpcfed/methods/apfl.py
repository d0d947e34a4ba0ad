"""APFL (Deng et al. 2020): every client mixes a personal row with the global one, v̄ᵢ = αᵢ
vᵢ + (1 − αᵢ) w, and trains vᵢ within the mixture.

Algorithm 1: in each of τ steps, on one minibatch ξ, a sampled client computes wᵢ ← wᵢ −
η ∇f(wᵢ; ξ) and vᵢ ← vᵢ − η αᵢ ∇f(v̄ᵢ; ξ); in the end it sends wᵢ to the server. Adaptive
αᵢ ← αᵢ − η ⟨vᵢ − wᵢ, ∇f(v̄ᵢ; ξ)⟩, clipped to [0, 1], once a round, in its first step.
All three use the values from before the step; the next mixture uses the new αᵢ. A
client is evaluated with the newest w in its mixture.
"""

from dataclasses import dataclass, field

from hpcfed.methods import IN_PLACE, OWNED, _steps, fedavg
from hpcfed.methods._interface import Cohort, Federation, Layout, Positions, Tensor
from hpcfed.methods._steps import followed, one_step, stepped
from hpcfed.options import LocalWork, RunConfig, Training, option

EXTENDS = fedavg
PRIVATE_MEAN = True


class Options(_steps.Options):
    apfl_alpha: float = option(
        0.5, "α: share of the personal row in a client's mixture", ge=0, le=1
    )
    apfl_adaptive: bool = option(
        False, "let every client learn its own α, from --apfl-alpha on"
    )

    def local_work(self, config: RunConfig, layout: Layout) -> LocalWork:
        # One gradient at w and one at the mixture.
        pairs = Training(config.batch_size, steps=1, times=2 * self.local_steps)
        return LocalWork((pairs,))


@dataclass(frozen=True)
class State(fedavg.State):
    v: Tensor = field(metadata=OWNED | IN_PLACE)
    """Every client's personal row."""
    alpha: Tensor = field(metadata=OWNED)
    """[clients, 1], the share of the personal row in the client's mixture."""


def init(fed: Federation[Options]) -> State:
    w = fed.initial_row()
    clients = len(fed.clients)
    alpha = w.new_full((clients, 1), fed.options.apfl_alpha)
    return State(w, w.repeat(clients, 1), alpha)


def round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    recipe = one_step(fed)
    w = fed.download(state.w, cohort)
    own, own_alpha = state.v[cohort.here], state.alpha[cohort.here]
    v, alpha = own, own_alpha
    # Both from zero in every round, like local momentum anywhere.
    w_velocity = v_velocity = w.new_zeros(w.shape)
    for step in range(fed.options.local_steps):
        mixture = _mixture(w, v, alpha)
        # Both use the same phase, so they draw the same minibatch ξ.
        w_trained = fed.train(w, cohort, recipe=recipe, phase=step, final=False)
        trained = fed.train(mixture, cohort, recipe=recipe, phase=step, final=False)
        change = trained - mixture  # −η ∇f(v̄; ξ)
        w_velocity, w_change = followed(fed, w_velocity, w_trained - w)
        # v's gradient was taken at the old mixture, so use the old α.
        v_velocity, v_change = followed(fed, v_velocity, alpha * change)
        if fed.options.apfl_adaptive and step == 0:
            alpha = _adapted(fed, alpha, (v - w) * change)
        w = stepped(fed, w, w_change, w_trained)
        v = stepped(fed, v, v_change, trained)
    fed.finish(w, cohort)

    state.v[cohort.here] = fed.revert_diverged(v, own, cohort)
    everyones_alpha = state.alpha.clone()
    everyones_alpha[cohort.here] = fed.revert_diverged(alpha, own_alpha, cohort)
    rows = fed.upload(w, cohort)
    return State(fed.mean(rows, cohort), state.v, everyones_alpha)


def personal(fed: Federation[Options], state: State, clients: Positions) -> Tensor:
    return _mixture(state.w, state.v[clients], state.alpha[clients])


def _mixture(w: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
    return alpha * v + (1 - alpha) * w


def _adapted(fed: Federation[Options], alpha: Tensor, slopes: Tensor) -> Tensor:
    """Return α after a step; `slopes` sum to −η times the gradient of α."""
    parameters = slice(0, fed.layout.num_parameters)
    step = slopes[:, parameters].sum(1, keepdim=True)
    return (alpha + step).clamp(0, 1)
