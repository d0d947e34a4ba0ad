"""Shared by methods whose clients may have adapters of different ranks.

A row has the columns of the largest rank, --lora. A client of rank k has the first k
components; its others are 0 in both factors. Then their gradients are 0, too, so that
they stay.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from hpcfed.errors import UserError
from hpcfed.federation.cohort import Sent
from hpcfed.methods import FIXED, _adapters, fedavg
from hpcfed.methods._adapters import adapters, components, rank_of
from hpcfed.methods._interface import Cohort, Federation, Positions, Tensor
from hpcfed.options import RunConfig, option

EXTENDS = fedavg


class Options(_adapters.Options):
    whole_rows = True

    client_ranks: str = option(
        "",
        "ranks of the clients' adapters, dealt in turn, as in 2,4,8; at most --lora "
        "(default: all have --lora)",
    )

    @property
    def dealt(self) -> list[int]:
        """The ranks that clients get in turn; none: all have the largest."""
        return [int(word) for word in self.client_ranks.split(",") if word.strip()]

    def check(self, config: RunConfig) -> None:
        try:
            ranks = self.dealt
        except ValueError:
            ranks = [0]
        most = config.lora or max(ranks, default=0)
        if any(not 1 <= rank <= most for rank in ranks):
            raise UserError(
                f"--client-ranks {self.client_ranks}: give whole numbers from 1 to "
                f"{most}, the rank of --lora, as in 1,{most}"
            )


@dataclass(frozen=True)
class State(fedavg.State):
    component_of: Tensor = field(metadata=FIXED)
    """The component of every column, counted from 1; 0 for columns of no adapter."""


def init(fed: Federation[Options]) -> State:
    return State(fed.initial_row(), components(fed.layout).to(fed.device))


def ranks_of(fed: Federation[Options], ids: np.ndarray) -> np.ndarray:
    """Return the ranks of clients."""
    dealt = fed.options.dealt or [rank_of(fed)]
    ranks: np.ndarray = np.array(dealt)[ids % len(dealt)]
    return ranks


def widths(fed: Federation[Options], ids: np.ndarray) -> np.ndarray:
    """Return how many columns clients have, and are sent: (inputs + outputs) · rank of
    every adapter, and all columns of no adapter.
    """
    each = sum(a.shape[1] + b.shape[0] for a, b in adapters(fed.layout))
    others = fed.layout.num_columns - rank_of(fed) * each
    return others + ranks_of(fed, ids) * each


def held(fed: Federation[Options], clients: Positions) -> Tensor:
    """Return [clients, 1 + components], True for what each client has; the first is for
    columns of no adapter.
    """
    ranks = torch.from_numpy(ranks_of(fed, fed.clients[clients]))
    number = torch.arange(rank_of(fed) + 1)
    return (number <= ranks[:, None]).to(fed.device)


def trained(
    fed: Federation[Options], state: State, cohort: Cohort
) -> tuple[Tensor, Sent]:
    """Return what the server receives of the cohort's rows after a local training, and
    which components each member has sent.
    """
    sent = Sent(held(fed, cohort.here), state.component_of)
    rows = fed.download(state.w, cohort, columns=widths(fed, cohort.clients))
    rows = rows * sent.columns()
    rows = fed.train(rows, cohort)
    # Noise of DP-SGD also falls on columns that a client does not have.
    rows = rows * sent.columns()
    uploads = fed.upload(rows, cohort, sent)
    # A compressed upload is a change of the server's row, which has all components.
    return uploads.where(sent.columns(), 0), sent


def personal(fed: Federation[Options], state: State, clients: Positions) -> Tensor:
    return state.w * held(fed, clients)[:, state.component_of]


def welcome(fed: Federation[Options], state: State, cohort: Cohort) -> Tensor:
    columns = int(widths(fed, np.flatnonzero(fed.sizes)).sum())
    return fed.greet(personal(fed, state, cohort.here), cohort, columns)
