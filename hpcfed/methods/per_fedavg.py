"""Per-FedAvg (Fallah et al. 2020): FedAvg of rows from which one step of each client's
own data leads to a good model.

Algorithm 1: a client repeats w̃ = w − α ∇f(w; D), w ← w − β (I − α ∇²f(w; D″)) ∇f(w̃; D′)
for τ steps, each with new minibatches. By default the factor with the Hessian is left
out, which the paper calls FO. --hessian difference includes it, as the paper's HF:
∇²f(w) v ≈ (∇f(w + δ v) − ∇f(w − δ v)) / 2δ, with v = ∇f(w̃; D′) and two more gradients
on D″. --weight-decay is part of f in all of them; --clip limits only ∇f(w; D) and v.
Kinks of ReLU between w ± δ v count as curvature, and the more so the smaller δ is.
Measured on an MLP, their error is up to 20 times the Hessian's own product at δ = 1e-4,
and as large as it at 1e-2.

β is --lr; momentum, if any, acts on the second step. Before a client is evaluated, it
takes the step with α once more.
"""

from dataclasses import replace
from typing import Literal

from hpcfed.methods import _steps, fedavg
from hpcfed.methods._interface import Cohort, Federation, Layout, Positions, Tensor
from hpcfed.methods._steps import followed, one_step, stepped
from hpcfed.options import LocalWork, Need, RunConfig, Training, option

EXTENDS = fedavg
PRIVATE_MEAN = True


class Options(_steps.Options):
    adapt_lr: float = option(0.01, "α, the learning rate of adaptation", gt=0)
    adapt_steps: int = option(
        1, "steps of adaptation before a client is judged", ge=1, le=100_000
    )
    hessian: Literal["none", "difference"] = option(
        "none",
        "the Hessian in the gradient: none, the paper's FO; difference, its HF, by "
        "differences of two more gradients",
    )
    hessian_delta: float = option(
        0.01,
        "δ of --hessian difference: gradients are taken at w ± δ v; small ones let kinks "
        "of ReLU weigh much",
        gt=0,
        needs=Need("--hessian difference", lambda run: run.hessian == "difference"),
    )

    def local_work(self, config: RunConfig, layout: Layout) -> LocalWork:
        # One gradient at w and one at w̃; two more for a product with the Hessian.
        gradients = 4 if self.hessian == "difference" else 2
        pairs = Training(config.batch_size, steps=1, times=gradients * self.local_steps)
        judged = Training(config.batch_size, steps=self.adapt_steps)
        return LocalWork((pairs,), (judged,))


def round(
    fed: Federation[Options], state: fedavg.State, cohort: Cohort
) -> fedavg.State:
    options = fed.options
    adaptation, descent = one_step(fed, options.adapt_lr), one_step(fed)
    rows = fed.download(state.w, cohort)
    velocity = rows.new_zeros(rows.shape)
    for step in range(options.local_steps):
        # Even phases draw D, odd ones D′.
        adapted = fed.train(
            rows, cohort, recipe=adaptation, phase=2 * step, final=False
        )
        trained = fed.train(
            adapted, cohort, recipe=descent, phase=2 * step + 1, final=False
        )
        # −β ∇f(w̃; D′): taken at w̃, applied to w.
        change = trained - adapted
        if options.hessian == "difference":
            # After all phases of D and D′, so that D″ is another minibatch.
            phase = 2 * options.local_steps + step
            curved = _hessian_product(fed, rows, change, cohort, phase=phase)
            change = change - options.adapt_lr * curved
        velocity, change = followed(fed, velocity, change)
        rows = stepped(fed, rows, change, trained)
    fed.finish(rows, cohort)
    rows = fed.upload(rows, cohort)
    return fedavg.State(fed.mean(rows, cohort))


def _hessian_product(
    fed: Federation[Options],
    rows: Tensor,
    change: Tensor,
    cohort: Cohort,
    *,
    phase: int,
) -> Tensor:
    """Return ∇²f(w; D″) times the change, which is −β v; 0 for running statistics."""
    parameters = fed.layout.num_parameters
    # δ v is −δ / β times the change; its sign does not matter.
    delta = fed.options.hessian_delta / fed.recipe(cohort.round).lr
    aside = delta * change
    aside[:, parameters:] = 0
    ahead = fed.gradients(rows + aside, cohort, phase=phase)
    behind = fed.gradients(rows - aside, cohort, phase=phase)
    decay = fed.config.weight_decay * change
    decay[:, parameters:] = 0
    return (ahead - behind) / (2 * delta) + decay


def personal(
    fed: Federation[Options], state: fedavg.State, clients: Positions
) -> Tensor:
    recipe = one_step(fed, fed.options.adapt_lr)
    recipe = replace(recipe, steps=fed.options.adapt_steps)
    # Adapted rows are not kept: the state has only w.
    rows = fedavg.personal(fed, state, clients)
    return fed.finetune(rows, clients, recipe=recipe)
