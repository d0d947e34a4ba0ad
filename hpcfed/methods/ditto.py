"""Ditto (Li et al. 2021): FedAvg, and beside it every client has a personal row v that
minimises its loss + λ/2 ‖v − w‖².

Algorithm 1: a sampled client trains w for the server, and its v with a pull to the w
that it was sent, each for --epochs. The recorded loss is that of w.
"""

from dataclasses import dataclass, field

from hpcfed import options
from hpcfed.clients.pull import Pull, Strengths
from hpcfed.methods import IN_PLACE, OWNED, fedavg
from hpcfed.methods._interface import Cohort, Federation, Layout, Positions, Tensor
from hpcfed.options import LocalWork, RunConfig, Training, option

EXTENDS = fedavg
PRIVATE_MEAN = True


class Options(options.Options):
    ditto_lambda: float = option(
        0.1,
        "λ: how strongly w draws personal rows; 0: they train alone",
        ge=0,
        also="lambda lamda lam",
    )

    def local_work(self, config: RunConfig, layout: Layout) -> LocalWork:
        # One training for w, one for v.
        return LocalWork((Training.usual(config), Training.usual(config)))


@dataclass(frozen=True)
class State(fedavg.State):
    v: Tensor = field(metadata=OWNED | IN_PLACE)
    """Every client's personal row."""


def init(fed: Federation[Options]) -> State:
    w = fed.initial_row()
    return State(w, v=w.repeat(len(fed.clients), 1))


def round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    w = fed.download(state.w, cohort)
    rows = fed.train(w, cohort)
    before = state.v[cohort.here]
    pull = Pull(Strengths(squared=fed.options.ditto_lambda), reference=w)
    # Not `train`: the round's loss, snapshot and clock are those of w.
    v = fed.finetune(before, cohort.here, pull=pull)
    state.v[cohort.here] = fed.revert_diverged(v, before, cohort)
    rows = fed.upload(rows, cohort)
    return State(fed.mean(rows, cohort), state.v)


def personal(fed: Federation[Options], state: State, clients: Positions) -> Tensor:
    return state.v[clients]
