"""Per-FedAvg (Fallah et al. 2020), first order: FedAvg of rows from which one step of
each client's own data leads to a good model.

Algorithm 1: a client repeats w̃ = w − α ∇f(w; D), w ← w − β ∇f(w̃; D′) for τ steps, each
with two new minibatches. The factor I − α ∇²f(w; D″) of the gradient is left out, which
the paper calls FO. β is --lr; momentum, if any, is on the second step. Before a client
is judged it takes the step with α once more.
"""

from dataclasses import replace

from hpcfed.config import LocalWork, RunConfig, Training, option
from hpcfed.methods import _steps, fedavg
from hpcfed.methods._interface import Cohort, Federation, Layout, Positions, Tensor
from hpcfed.methods._steps import one_step, stepped

EXTENDS = fedavg


class Options(_steps.Options):
    private_mean = True

    adapt_lr: float = option(0.01, "α, the learning rate of adaptation", gt=0)
    adapt_steps: int = option(
        1, "steps of adaptation before a client is judged", ge=1, le=100_000
    )

    def local_work(self, config: RunConfig, layout: Layout) -> LocalWork:
        # A gradient at w, and one at w̃.
        pairs = Training(config.batch_size, steps=1, times=2 * self.local_steps)
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
        # Even phases have D, odd ones D′.
        adapted = fed.train(
            rows, cohort, recipe=adaptation, phase=2 * step, final=False
        )
        trained = fed.train(
            adapted, cohort, recipe=descent, phase=2 * step + 1, final=False
        )
        # −β ∇f(w̃; D′), which w takes in place of w̃.
        change = trained - adapted
        velocity = fed.config.momentum * velocity + change
        rows = stepped(fed, rows, velocity, trained)
    fed.finish(rows, cohort)
    rows = fed.upload(rows, cohort)
    return fedavg.State(fed.mean(rows, cohort))


def personal(
    fed: Federation[Options], state: fedavg.State, clients: Positions
) -> Tensor:
    recipe = one_step(fed, fed.options.adapt_lr)
    recipe = replace(recipe, steps=fed.options.adapt_steps)
    # Nothing of it stays: the state has w alone.
    rows = fedavg.personal(fed, state, clients)
    return fed.finetune(rows, clients, recipe=recipe)
