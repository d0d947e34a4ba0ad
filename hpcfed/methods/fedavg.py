"""FedAvg (McMahan et al. 2017): every client starts from w and trains; w ← Σ (nᵢ / Σn)
rowᵢ.
"""

from dataclasses import dataclass

from hpcfed import options
from hpcfed.methods import Cohort, Federation, Positions, Tensor

PRIVATE_MEAN = True


class Options(options.Options):
    """FedAvg adds no options of its own."""


@dataclass(frozen=True)
class State:
    w: Tensor
    """The global row."""


def init(fed: Federation) -> State:
    return State(fed.initial_row())


def round(fed: Federation, state: State, cohort: Cohort) -> State:
    rows = fed.download(state.w, cohort)
    rows = fed.train(rows, cohort)
    rows = fed.upload(rows, cohort)
    return State(fed.mean(rows, cohort))


# A view: all clients share one row in memory.
def personal(fed: Federation, state: State, clients: Positions) -> Tensor:
    return state.w.expand(len(clients), -1)


def global_row(state: State) -> Tensor:
    return state.w


def welcome(fed: Federation, state: State, cohort: Cohort) -> Tensor:
    rows = state.w.expand(len(cohort.here), -1)
    return fed.greet(rows, cohort)
