"""The way between clients and the server: what an upload passes before the server has
it, and a download before clients have it.

    attack → clip → local noise → compress → clip again → arrive → aggregate → central
    noise

A run builds only the parts that it asks for (`federation/channel/build.py`); without any, uploads
arrive as they were sent, and nothing here is called. `options/chain.py` has the order.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from hpcfed.errors import UserError
from hpcfed.federation.channel.times import Clock
from hpcfed.federation.cohort import Cohort, Sent


@dataclass(frozen=True)
class Upload:
    """What this rank's members of a cohort send: a stage takes one, and returns what is
    left of it.
    """

    rows: Tensor
    """A row per member: what it sends, and in the end what the server receives."""
    start: Tensor
    """What the server has sent each of them; 0 where it has sent nothing. May be a view
    of one row.
    """
    cohort: Cohort
    sent: Sent | None = None
    """Which columns each member sends, where not all: others are no update."""
    stream: int = 0
    """Counts the uploads of a round: control variates go beside rows, as the second."""
    size: Tensor | int | None = None
    """Bytes that each member sends, or the bytes of every one; None as long as rows are
    not packed.
    """


class Stage(Protocol):
    """A part of the way up."""

    phase: str
    """The phase of a round that its time counts for."""

    def __call__(self, upload: Upload) -> Upload:
        """Return what becomes of the upload; the same call on every rank."""


@dataclass(frozen=True)
class Download:
    """What this rank's members of a cohort are sent."""

    rows: Tensor
    """One row for all members, or a row for each."""
    cohort: Cohort
    everyone: bool = False
    """Whether clients that were not sampled get it, too."""
    stream: int = 0
    """Counts the downloads of a round."""
    size: int = 0
    """Bytes that all receivers together are sent."""
    sizes: np.ndarray | None = None
    """Bytes that each member of the cohort is sent; None where all are sent as many."""


class Packing(Protocol):
    """A part of the way down."""

    def __call__(self, download: Download) -> Download:
        """Return what clients receive; the same call on every rank."""


class Devices(Protocol):
    """The devices of all clients of the federation, by id."""

    @property
    def speed(self) -> np.ndarray:
        """How fast each computes, relative to a usual one."""

    @property
    def downlink(self) -> np.ndarray:
        """Bytes per second from the server."""

    @property
    def uplink(self) -> np.ndarray:
        """Bytes per second to the server."""

    def seconds(
        self,
        clients: np.ndarray,
        steps: np.ndarray | int,
        down_bytes: np.ndarray | float,
        up_bytes: np.ndarray | float,
    ) -> np.ndarray:
        """Return what each of these clients takes to download, train and upload, in
        virtual time.
        """

    def presence(self, clients: np.ndarray) -> "Presence | None":
        """Return when these clients are there; None: always."""


class Presence(Protocol):
    """When some clients are there."""

    def at(self, now: float) -> np.ndarray:
        """Return which of them are there at this moment of virtual time."""

    def next(self, now: float) -> float:
        """Return the first moment from `now` on at which one of them is there; infinity
        if none ever is again.
        """


class Spending(Protocol):
    """Counts what local training gives away of clients' samples."""

    def add(self, clients: np.ndarray, times: np.ndarray) -> None:
        """Count that samples of these clients, by position, were trained on so often."""

    def epsilon(self) -> float:
        """Return ε spent so far, on the root; the same call on every rank."""


AfterMean = Callable[[Tensor, Cohort], Tensor]
"""Takes the mean of a round's uploads, and returns what the server makes of it."""


@dataclass
class Memory:
    """Tensors that the way keeps from one round to the next.

    Checkpoints hold them, and rows go where their clients go.
    """

    num_clients: int
    """Clients of this rank."""
    rows: dict[str, Tensor] = field(default_factory=dict)
    """Tensors with an entry per client of this rank."""
    shared: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that are the same on every rank."""

    def owned(self, name: str, like: Tensor) -> Tensor:
        """Return an entry per client of this rank, to be overwritten in place: zeros
        like `like` at first.

        Every rank asks for it in the same round, with clients in the cohort or without.
        """
        if name not in self.rows:
            self.rows[name] = like.new_zeros(self.num_clients, *like.shape)
        rows = self.rows[name]
        # Compared as one entry: the number of clients is right by now.
        self._check(name, rows.new_empty(rows.shape[1:]), like)
        # A checkpoint was read to the host.
        if rows.device != like.device:
            self.rows[name] = rows = rows.to(like.device)
        return rows

    def common(self, name: str, first: Tensor) -> Tensor:
        """Return what was last kept under this name, the same on every rank; `first`
        where nothing was.
        """
        kept = self.shared.get(name)
        if kept is None:
            return first
        self._check(name, kept, first)
        return kept.to(first.device)

    def keep(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor that is the same on every rank."""
        self.shared[name] = tensor

    def _check(self, name: str, kept: Tensor, asked: Tensor) -> None:
        """Refuse what a checkpoint of other options has left."""
        if kept.shape != asked.shape or kept.dtype != asked.dtype:
            raise UserError(
                f"the checkpoint's {name} is {kept.dtype} of shape "
                f"{tuple(kept.shape)}, not {asked.dtype} of {tuple(asked.shape)}"
            )


@dataclass
class Way:
    """The parts of the way that a run has asked for."""

    stages: tuple[Stage, ...] = ()
    """What uploads pass, in order."""
    packing: Packing | None = None
    """What downloads pass."""
    after_mean: AfterMean | None = None
    """What the server does to the mean of a round's uploads."""
    clock: Clock | None = None
    """When uploads arrive."""
    upload_bytes: Callable[[Tensor], int] | None = None
    """Returns the bytes in which all columns of such a row are packed; None where rows
    are not.
    """
    spending: Spending | None = None
    """What local training that is private by itself has spent; None where it is not."""
    memory: Memory = field(default_factory=lambda: Memory(0))
    devices: Devices | None = None
    """Those of the run's clients, where there is a virtual clock."""
