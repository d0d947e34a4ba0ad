"""FedUmf: clients that are not sampled train too, and start from what they learnt when
they are sampled next.

Read here from GenFed's account of it: in every round an unsampled client trains from w
and keeps its update in place of the one before; a sampled client starts from w + β ×
the update it has kept, and has none afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from hpcfed import config
from hpcfed.config import RunConfig, Switch, option
from hpcfed.methods import OWNED
from hpcfed.methods.fedavg import global_row, personal, welcome

if TYPE_CHECKING:
    from torch import Tensor

    from hpcfed.federation.federation import Cohort, Federation

__all__ = ["Options", "State", "global_row", "init", "personal", "round", "welcome"]


class Options(config.Options):
    all_train = True

    umf_beta: float = option(
        1.0, "β: what a kept update counts for where a client starts", ge=0
    )

    def switches(self, config: RunConfig) -> Iterable[Switch]:
        yield from super().switches(config)
        yield Switch(
            "umf_beta", "a --participation below 1", config.cohort_size < config.clients
        )


@dataclass(frozen=True)
class State:
    w: Tensor
    """The global row."""
    kept: Tensor = field(metadata=OWNED)
    """Every client's kept update; zero where it has none."""


def init(fed: Federation) -> State:
    w = fed.initial_row()
    return State(w, w.new_zeros(len(fed.clients), len(w)))


def round(fed: Federation, state: State, cohort: Cohort) -> State:
    rows = fed.upload(train(fed, state, cohort), cohort)
    return State(fed.mean(rows, cohort), state.kept)


def train(fed: Federation, state: State, cohort: Cohort) -> Tensor:
    """The cohort's rows after local training; all others train, too, and keep their
    updates.
    """
    start = (
        fed.download(state.w, cohort, everyone=True)
        + cast(Options, fed.options).umf_beta * state.kept[cohort.here]
    )
    rows = fed.train(start, cohort)
    rest = cohort.others(len(fed.clients))
    # In place: all clients' rows may fill half of the memory.
    learnt = fed.finetune(state.w.expand(len(rest), -1), rest) - state.w
    state.kept[rest] = fed.revert_diverged(
        learnt, learnt.new_zeros(()).expand_as(learnt), cohort, rest
    )
    state.kept[cohort.here] = 0
    return rows
