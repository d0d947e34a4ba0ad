"""The channel between clients and the server: the stages that an upload passes on its
way to the server, and a download on its way to clients.

`options/channel.py` has the order. A run builds only the parts that it asks for
(`build.py`). Without any, uploads arrive as they were sent and nothing here is called.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from hpcfed.federation.channel import Memory
from hpcfed.federation.channel.accountant import SampleSpending
from hpcfed.federation.channel.clock import VirtualClock
from hpcfed.federation.channel.devices import Devices
from hpcfed.federation.cohort import Cohort, Sent


@dataclass(frozen=True)
class Upload:
    """What members here send. A stage takes it and returns what is left."""

    rows: Tensor
    """A row per member: what it sends, and in the end what the server receives."""
    start: Tensor
    """What the server sent each of them, or 0. May be a view of one row."""
    cohort: Cohort
    sent: Sent | None = None
    """Which columns each member sends, as its update; None: all."""
    stream: int = 0
    """Number of the upload within the round: rows are 0, variates follow as 1."""
    size: Tensor | int | None = None
    """Bytes that each member sends, or one number for all; None: not packed yet."""


class Stage(Protocol):
    """A part of the channel that uploads pass."""

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
    """Bytes that each member of the cohort is sent; None if all are sent the same."""


class Packing(Protocol):
    """A part of the channel that downloads pass."""

    def __call__(self, download: Download) -> Download:
        """Return what clients receive; the same call on every rank."""


AfterMean = Callable[[Tensor, Cohort], Tensor]
"""Takes the mean of a round's uploads, and returns what the server makes of it."""


@dataclass
class Channel:
    """The parts that a run has asked for."""

    stages: tuple[Stage, ...] = ()
    """What uploads pass, in order."""
    packing: Packing | None = None
    """What downloads pass."""
    after_mean: AfterMean | None = None
    """What the server does to the mean of a round's uploads."""
    clock: VirtualClock | None = None
    """When uploads arrive."""
    upload_bytes: Callable[[Tensor], int] | None = None
    """Returns the bytes of a row once it is packed; None if rows are not packed."""
    spending: SampleSpending | None = None
    """Counts what DP-SGD within clients has spent; None if clients do not use it."""
    memory: Memory = field(default_factory=lambda: Memory(0))
    devices: Devices | None = None
    """Devices of the run's clients; None without a virtual clock."""
    uploads: int = 0
    """How many uploads have passed so far, of rows or beside them."""
    downloads: int = 0
    """How many downloads have passed so far."""
