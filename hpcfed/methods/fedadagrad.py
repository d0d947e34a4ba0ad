"""FedAdagrad (Reddi et al. 2021): the server steps by Adagrad along the mean update Δ: v
← v + Δ², w ← w + η m / (√v + τ).

As in the paper there is no momentum by default, and no bias correction.
"""

from hpcfed.methods import _server_optimiser
from hpcfed.methods._interface import Cohort, Federation, Tensor
from hpcfed.methods._server_optimiser import State, adaptive_round
from hpcfed.options import option

EXTENDS = _server_optimiser
PRIVATE_MEAN = True


class Options(_server_optimiser.Options):
    # The sum of all Δ² shrinks the steps, so the first ones are larger than Adam's.
    server_lr: float = option(0.1, "η, the server's learning rate", gt=0)
    server_momentum: float = option(
        0.0, "β₁: what the server's momentum keeps of its past", ge=0, lt=1
    )


def round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    return adaptive_round(fed, state, cohort, second_moment=_second_moment)


def _second_moment(v: Tensor, squared: Tensor) -> Tensor:
    return v + squared
