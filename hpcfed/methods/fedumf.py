"""FedUmf: clients that are not sampled train too, and start from what they learnt when
they are sampled next.

We follow GenFed's description: in every round an unsampled client trains from w and
stores its update in place of the one before. A sampled client starts from w + β × its
stored update, which is then cleared.
"""

from dataclasses import dataclass, field, replace

from hpcfed import options
from hpcfed.methods import IN_PLACE, OWNED, Cohort, Federation, Tensor, fedavg
from hpcfed.options import SAMPLED, option

EXTENDS = fedavg
PRIVATE_MEAN = True


class Options(options.Options):
    all_train = True

    umf_beta: float = option(
        1.0,
        "β: weight of the stored update in the row that a client starts from",
        ge=0,
        needs=SAMPLED,
    )


@dataclass(frozen=True)
class State(fedavg.State):
    stored: Tensor = field(metadata=OWNED | IN_PLACE)
    """Every client's stored update; zero if it has none."""


def init(fed: Federation[Options]) -> State:
    w = fed.initial_row()
    return State(w, stored=w.new_zeros(len(fed.clients), len(w)))


def round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    rows = train(fed, state, cohort)
    rows = fed.upload(rows, cohort)
    return replace(state, w=fed.mean(rows, cohort))


def train(fed: Federation[Options], state: State, cohort: Cohort) -> Tensor:
    """Return the cohort's trained rows; all others train and store updates."""
    # All clients train from w, so all of them download it.
    start = fed.download(state.w, cohort, everyone=True)
    start = start + fed.options.umf_beta * state.stored[cohort.here]
    rows = fed.train(start, cohort)
    rest = cohort.others(len(fed.clients))
    # Not `train`: a round's losses and snapshots are those of its cohort.
    start = state.w.expand(len(rest), -1)
    updates = fed.finetune(start, rest) - state.w
    # A client that has diverged stores no update.
    none = updates.new_zeros(()).expand_as(updates)
    state.stored[rest] = fed.revert_diverged(updates, none, cohort, rest)
    state.stored[cohort.here] = 0
    return rows
