"""FedYogi (Reddi et al. 2021): the server steps by Yogi along the mean update Δ: v ← v −
(1 − β₂) Δ² sign(v − Δ²), w ← w + η m / (√v + τ).

Unlike Adam, which forgets v, Yogi changes it by at most Δ².
"""

from functools import partial

from hpcfed.methods import fedadam
from hpcfed.methods._interface import Cohort, Federation, Tensor
from hpcfed.methods._server_optimiser import State, adaptive_round

EXTENDS = fedadam
PRIVATE_MEAN = True


class Options(fedadam.Options):
    pass


def round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    second_moment = partial(_second_moment, fed.options.server_beta2)
    return adaptive_round(fed, state, cohort, second_moment=second_moment)


def _second_moment(beta2: float, v: Tensor, squared: Tensor) -> Tensor:
    return v - (1 - beta2) * squared * (v - squared).sign()
