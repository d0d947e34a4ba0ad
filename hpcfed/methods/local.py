"""Local-only: every client trains its own model, from a common start, and never
communicates.
"""

from dataclasses import dataclass, field

from hpcfed import options
from hpcfed.methods import IN_PLACE, OWNED
from hpcfed.methods._interface import Cohort, Federation, Positions, Tensor


class Options(options.Options):
    # Without uploads there is nothing to forge or to aggregate.
    uploads = averages = False


@dataclass(frozen=True)
class State:
    rows: Tensor = field(metadata=OWNED | IN_PLACE)
    """Every client's own row."""


def init(fed: Federation) -> State:
    return State(fed.initial_row().repeat(len(fed.clients), 1))


def round(fed: Federation, state: State, cohort: Cohort) -> State:
    # Indexing copies, so the old rows are still there to revert to.
    before = state.rows[cohort.here]
    rows = fed.train(before, cohort)
    state.rows[cohort.here] = fed.revert_diverged(rows, before, cohort)
    return state


def personal(fed: Federation, state: State, clients: Positions) -> Tensor:
    return state.rows[clients]


def global_row(state: State) -> None:
    return None


def welcome(fed: Federation, state: State, cohort: Cohort) -> Tensor:
    # Not sent by `greet`: a client that never communicates makes the row itself.
    return fed.initial_row().expand(len(cohort.here), -1)
