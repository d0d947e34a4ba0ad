"""FedAvg (McMahan et al. 2017): every client starts from w and trains; w ← Σ (nᵢ / Σn)
rowᵢ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcfed.config import Options

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from hpcfed.federation.federation import Cohort, Federation

__all__ = ["Options", "State", "global_row", "init", "personal", "round", "welcome"]


@dataclass(frozen=True)
class State:
    w: Tensor
    """The global row."""


def init(fed: Federation) -> State:
    return State(fed.initial_row())


def round(fed: Federation, state: State, cohort: Cohort) -> State:
    rows = fed.train(fed.download(state.w, cohort), cohort)
    return State(fed.mean(fed.upload(rows, cohort), cohort))


def personal(fed: Federation, state: State, clients: np.ndarray) -> Tensor:
    return state.w.expand(len(clients), -1)


def global_row(state: State) -> Tensor:
    return state.w


def welcome(fed: Federation, state: State, cohort: Cohort) -> Tensor:
    return fed.greet(state.w.expand(len(cohort.here), -1), cohort)
