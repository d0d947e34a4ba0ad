"""What methods have in common that share some columns of the rows and leave the others
to each client.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from hpcfed import config
from hpcfed.config import option
from hpcfed.errors import UserError
from hpcfed.methods import FIXED, OWNED
from hpcfed.models import MODELS

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from hpcfed.federation.federation import Cohort, Federation


class Options(config.Options):
    head_layers: int = option(
        1,
        "convolutions and linear layers, the last ones, that form the head; others are the body",
        ge=0,
    )

    def check(self, config: config.RunConfig) -> None:
        most = MODELS[config.network()].layers
        if self.head_layers > most:
            raise UserError(
                f"--head-layers {self.head_layers}, but {config.network()} has {most} "
                "layers with weights"
            )


@dataclass(frozen=True)
class State:
    shared: Tensor
    """The server's row of the shared columns."""
    own: Tensor = field(metadata=OWNED)
    """Every client's row of all other columns."""
    shared_at: Tensor = field(metadata=FIXED)
    """Which columns the shared ones are, by position."""
    own_at: Tensor = field(metadata=FIXED)


def body_and_head(fed: Federation) -> tuple[Tensor, Tensor]:
    """Two masks over the columns, on the host, where the engine reads them."""
    head = fed.layout.mask(fed.layout.last(cast(Options, fed.options).head_layers))
    return ~head, head


def begin(fed: Federation, *, shared: Tensor) -> State:
    """The state before the first round: all clients have the common initial row."""
    row = fed.initial_row()
    shared_at, own_at = (
        mask.nonzero().squeeze(1).to(row.device) for mask in (shared, ~shared)
    )
    return State(
        row[shared_at], row[own_at].repeat(len(fed.clients), 1), shared_at, own_at
    )


def join(state: State, shared: Tensor, own: Tensor) -> Tensor:
    """Whole rows of their two parts; one shared part serves for all."""
    rows = own.new_empty(len(own), len(state.shared_at) + len(state.own_at))
    rows[:, state.shared_at] = shared
    rows[:, state.own_at] = own
    return rows


def download(fed: Federation, state: State, cohort: Cohort) -> Tensor:
    """The cohort's rows at the start of a round: the server's columns, and what each
    client kept.
    """
    return join(state, fed.download(state.shared, cohort), state.own[cohort.here])


def upload(fed: Federation, state: State, rows: Tensor, cohort: Cohort) -> State:
    """The state after a round: the mean of the shared columns, and every client's own
    as it trained them.
    """
    # In place: all clients' rows may fill half of the memory.
    state.own[cohort.here] = fed.revert_diverged(
        rows[:, state.own_at], state.own[cohort.here], cohort
    )
    return replace(
        state, shared=fed.mean(fed.upload(rows[:, state.shared_at], cohort), cohort)
    )


def personal(fed: Federation, state: State, clients: np.ndarray) -> Tensor:
    return join(state, state.shared, state.own[clients])


def global_row(state: State) -> None:
    return None  # the server knows a part of the network


def welcome(fed: Federation, state: State, cohort: Cohort) -> Tensor:
    """A new client: the server's columns, and the others from the common initial row."""
    own = fed.initial_row()[state.own_at].expand(len(cohort.here), -1)
    rows = join(state, state.shared, own)
    return fed.greet(rows, cohort, fed.num_holders * len(state.shared_at))
