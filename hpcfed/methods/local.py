"""Local-only: every client trains its own model, from a common start, and never
communicates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpcfed import config
from hpcfed.methods import OWNED

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from hpcfed.federation.federation import Cohort, Federation

__all__ = ["Options", "State", "global_row", "init", "personal", "round", "welcome"]


class Options(config.Options):
    uploads = averages = False


@dataclass(frozen=True)
class State:
    rows: Tensor = field(metadata=OWNED)
    """Every client's own row."""


def init(fed: Federation) -> State:
    return State(fed.initial_row().repeat(len(fed.clients), 1))


def round(fed: Federation, state: State, cohort: Cohort) -> State:
    # In place: all clients' rows may fill half of the memory.
    before = state.rows[cohort.here]
    state.rows[cohort.here] = fed.revert_diverged(
        fed.train(before, cohort), before, cohort
    )
    return state


def personal(fed: Federation, state: State, clients: np.ndarray) -> Tensor:
    return state.rows[clients]


def global_row(state: State) -> None:
    return None


def welcome(fed: Federation, state: State, cohort: Cohort) -> Tensor:
    return fed.initial_row().expand(len(cohort.here), -1)
