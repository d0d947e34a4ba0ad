"""Shared by methods whose clients share some columns and keep the others private."""

from dataclasses import dataclass, field, replace

from hpcfed import options
from hpcfed.methods import FIXED, IN_PLACE, OWNED
from hpcfed.methods._interface import Cohort, Federation, Layout, Positions, Tensor
from hpcfed.options import check_layers, option


class Options(options.Options):
    whole_rows = False

    head_layers: int = option(
        1,
        "convolutions and linear layers, the last ones, that form the head; others are "
        "the body",
        ge=0,
    )

    def check(self, config: options.RunConfig) -> None:
        info = config.model_info()
        if info is not None:
            self._check_layers(info.layers, config.network())

    def check_layout(self, layout: Layout, network: str) -> None:
        self._check_layers(len(layout.trained_blocks), network)

    def _check_layers(self, most: int, network: str) -> None:
        check_layers("head_layers", self.head_layers, most, network)


@dataclass(frozen=True)
class State:
    shared: Tensor
    """The server's row of the shared columns."""
    private: Tensor = field(metadata=OWNED | IN_PLACE)
    """Every client's row of the private columns."""
    shared_at: Tensor = field(metadata=FIXED)
    """Which columns are shared, by position."""
    private_at: Tensor = field(metadata=FIXED)
    """Which columns are private, by position."""


def body_and_head(fed: Federation[Options]) -> tuple[Tensor, Tensor]:
    """Return masks of body and head columns, on the host, for the engine to read."""
    layers = fed.layout.last(fed.options.head_layers)
    head = fed.layout.mask(layers)
    return ~head, head


def begin(fed: Federation, *, shared: Tensor) -> State:
    """Return the first state: all clients have the common initial row."""
    row = fed.initial_row()
    # Positions, not masks: indexing by a mask synchronises GPU and host.
    shared_at = shared.nonzero().squeeze(1).to(row.device)
    private_at = (~shared).nonzero().squeeze(1).to(row.device)
    private = row[private_at].repeat(len(fed.clients), 1)
    return State(row[shared_at], private, shared_at, private_at)


def join(state: State, shared: Tensor, private: Tensor) -> Tensor:
    """Join shared and private columns; `shared` may be one row for all clients."""
    width = len(state.shared_at) + len(state.private_at)
    rows = private.new_empty(len(private), width)
    rows[:, state.shared_at] = shared
    rows[:, state.private_at] = private
    return rows


def download(fed: Federation, state: State, cohort: Cohort) -> Tensor:
    """Return rows at the start of a round: the server's and private columns."""
    shared = fed.download(state.shared, cohort)
    return join(state, shared, state.private[cohort.here])


def aggregate(fed: Federation, state: State, rows: Tensor, cohort: Cohort) -> State:
    """Return the state after a round: the mean of the shared columns, and the private
    columns as each client trained them.
    """
    # If a client's shared columns diverge, the mean leaves it out. If its private
    # columns diverge, it keeps the old ones.
    before = state.private[cohort.here]
    private = rows[:, state.private_at]
    state.private[cohort.here] = fed.revert_diverged(private, before, cohort)
    # The download had the same columns, so the channel finds what members started from.
    uploads = fed.upload(rows[:, state.shared_at], cohort)
    return replace(state, shared=fed.mean(uploads, cohort))


def personal(fed: Federation, state: State, clients: Positions) -> Tensor:
    return join(state, state.shared, state.private[clients])


def global_row(state: State) -> None:
    return None  # the server knows only a part of the network


def welcome(fed: Federation, state: State, cohort: Cohort) -> Tensor:
    """Give new clients the server's columns, and the initial row's for the rest."""
    # All clients know the initial row: only the shared columns are sent.
    private = fed.initial_row()[state.private_at].expand(len(cohort.here), -1)
    rows = join(state, state.shared, private)
    return fed.greet(rows, cohort, fed.num_holders * len(state.shared_at))
