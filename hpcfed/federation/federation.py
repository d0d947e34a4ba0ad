"""The federation as a method sees it: clients of this rank, rows, and a few verbs. No
MPI, no CUDA, no files.
"""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
from torch import Tensor

from hpcfed.clients.placement import Clients
from hpcfed.federation.exchange import Exchange
from hpcfed.federation.participants import Participants
from hpcfed.federation.server_side import ServerSide
from hpcfed.federation.training import LocalTraining, Shards
from hpcfed.options import Options

if TYPE_CHECKING:  # most runs have no server's model, and do not load its code
    from hpcfed.server.client import ServerClient

MethodOptions = TypeVar("MethodOptions", bound=Options, covariant=True)
T = TypeVar("T")


class Federation(Generic[MethodOptions]):
    """What one rank knows and can do, built from four parts.

    `Participants` says who takes part in a round, `LocalTraining` what clients do on
    their own, `Exchange` what travels, and `ServerSide` what the server makes of it.
    Each verb is a method of its part, where it is described.
    """

    def __init__(
        self,
        options: MethodOptions,
        *,
        members: Participants,
        training: LocalTraining,
        exchange: Exchange,
        server_side: ServerSide,
        generated: Tensor | None = None,
    ) -> None:
        """`generated`: positions of the columns that the server's model generates."""
        self.config = members.config
        self.options = options
        self.members = members
        self.training = training
        self.server_side = server_side
        self.channel = exchange.channel
        self._generated = generated
        # Who takes part.
        self.weight_of = members.weight_of
        self.generator = members.generator
        self.sample = members.sample
        self.invite = members.invite
        self.instead_of = members.instead_of
        self.everyone = members.everyone
        # What clients do.
        self.layout = training.layout
        self.device = training.device
        self.initial_row = training.initial_row
        self.fresh_row = training.fresh_row
        self.keys = training.keys
        self.recipe = training.recipe
        self.num_steps = training.num_steps
        self.everyones_steps = training.everyones_steps
        self.train = training.train
        self.finish = training.finish
        self.gradients = training.gradients
        self.losses = training.losses
        self.finetune = training.finetune
        self.train_alone = training.train_alone
        self.fisher = training.fisher
        self.evaluate = training.evaluate
        self.agreement = training.agreement
        self.revert_diverged = training.revert_diverged
        # What travels.
        self.download = exchange.download
        self.upload = exchange.upload
        self.arrived = exchange.arrived
        self.close_round = exchange.close_round
        self.greet = exchange.greet
        self.hears = exchange.hears
        # What the server does.
        self.mean = server_side.mean
        self.select = server_side.select
        self.cluster_means = server_side.cluster_means
        self.sum = server_side.sum
        self.exclude = server_side.exclude
        self.bases = server_side.bases
        self.bank = server_side.bank
        self.learn = server_side.learn
        self.invert = server_side.invert
        self.begin_learning = server_side.begin_learning
        self.finish_learning = server_side.finish_learning
        self._exchange = exchange

    @property
    def clients(self) -> np.ndarray:
        """Ids of this rank's clients, ascending; relocating clients changes them."""
        return self.members.clients

    @property
    def sizes(self) -> np.ndarray:
        """Training samples of every client of the federation."""
        return self.members.sizes

    @property
    def weights(self) -> np.ndarray:
        """Relative weight of every client of the federation: see `Participants`."""
        self.members.weighed = True
        return self.members.weights

    @property
    def round(self) -> int:
        """The round in progress, or the last one."""
        return self.members.round

    @property
    def num_holders(self) -> int:
        """Clients of the federation that have training data."""
        return self.members.num_holders

    @property
    def is_deserted(self) -> bool:
        """Whether no client will ever be available again, by the virtual clock."""
        return self._exchange.is_deserted

    @property
    def server(self) -> "ServerClient":
        """The server's model, for methods that have one."""
        return self.server_side.server

    @property
    def generated(self) -> Tensor:
        """Positions of the columns that the server's model generates."""
        assert self._generated is not None
        return self._generated

    def agreed(self, value: T) -> T:
        """Return the first rank's value, so that rounding cannot part the ranks."""
        answer: T = self.members.collectives.bcast(value)
        return answer

    def timed(self, phase: str) -> AbstractContextManager[None]:
        """Count what a method computes itself as time of this phase."""
        return self.members.timer.phase(phase)

    def relocate(self, clients: Clients, shards: Shards) -> None:
        """Take over this rank's clients and data, after some have moved."""
        self.members.relocated(clients)
        self.training.reload(shards)
