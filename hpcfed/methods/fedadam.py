"""FedAdam (Reddi et al. 2021): the server steps by Adam along the mean update Δ: v ← β₂ v
+ (1 − β₂) Δ², w ← w + η m / (√v + τ).

As in the paper there is no bias correction: v starts at τ².
"""

from functools import partial

from hpcfed.methods import _server_optimiser
from hpcfed.methods._interface import Cohort, Federation, Tensor
from hpcfed.methods._server_optimiser import State, adaptive_round
from hpcfed.options import option

EXTENDS = _server_optimiser
PRIVATE_MEAN = True


class Options(_server_optimiser.Options):
    server_beta2: float = option(0.99, "β₂: what v keeps of its past", ge=0, lt=1)


def round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    second_moment = partial(_second_moment, fed.options.server_beta2)
    return adaptive_round(fed, state, cohort, second_moment=second_moment)


def _second_moment(beta2: float, v: Tensor, squared: Tensor) -> Tensor:
    return beta2 * v + (1 - beta2) * squared
