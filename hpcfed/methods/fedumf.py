"""FedUmf: clients that are not sampled train too, and start from what they learnt when
they are sampled next.

We follow GenFed's description: in every round an unsampled client trains from w and
stores its update in place of the one before. A sampled client starts from w + β × its
stored update, which is then cleared.

So what a client has stored is always of the round before, and only the next cohort ever
uses it. We compute an update when it is used: of 100 clients 20 train in a round, not
all, and the rows are the same.
"""

from dataclasses import dataclass

import numpy as np
import torch

from hpcfed import options
from hpcfed.methods import Cohort, Federation, Tensor, fedavg
from hpcfed.options import SAMPLED, option
from hpcfed.runtime.device import on_device

EXTENDS = fedavg
PRIVATE_MEAN = True


class Options(options.Options):
    unsampled_train = True

    umf_beta: float = option(
        1.0,
        "β: weight of the stored update in the row that a client starts from",
        ge=0,
        needs=SAMPLED,
    )


@dataclass(frozen=True)
class State(fedavg.State):
    before: Tensor
    """The global row of the round before."""
    sampled: Tensor
    """Which clients of the federation took part in that round; all, if there was none."""


def init(fed: Federation[Options]) -> State:
    w = fed.initial_row()
    everyone = torch.ones(len(fed.sizes), dtype=torch.bool)
    return State(w, before=w, sampled=everyone)


def round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    rows = fed.upload(train(fed, state, cohort), cohort)
    return after(fed, state, fed.mean(rows, cohort), cohort)


def train(fed: Federation[Options], state: State, cohort: Cohort) -> Tensor:
    """Return the cohort's trained rows."""
    # All clients train from w, so all of them download it.
    start = fed.download(state.w, cohort, everyone=True)
    ids = cohort.clients[cohort.chosen]
    stored = np.flatnonzero(~state.sampled.numpy()[ids])
    if fed.options.umf_beta and len(stored):
        clients = cohort.here[stored]
        # Not `train`: a round's losses and snapshots are those of its cohort.
        before = state.before.expand(len(clients), -1)
        rows = fed.finetune(before, clients, round=cohort.round - 1)
        updates = rows - state.before
        # A client that has diverged has stored no update.
        none = updates.new_zeros(()).expand_as(updates)
        updates = fed.revert_diverged(updates, none, cohort, clients)
        places = on_device(stored, start.device)
        start = start.index_add(0, places, updates, alpha=fed.options.umf_beta)
    return fed.train(start, cohort)


def after(fed: Federation[Options], state: State, w: Tensor, cohort: Cohort) -> State:
    """Return the state after a round that has led to `w`."""
    sampled = torch.zeros(len(fed.sizes), dtype=torch.bool)
    sampled[cohort.clients] = True
    return State(w, before=state.w, sampled=sampled)
