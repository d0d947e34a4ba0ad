"""One round on this rank: its figures, which the recorder reads, and what is in flight
between clients and the server until it ends.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from hpcfed.clients.job import Losses
from hpcfed.clients.schedule import Work
from hpcfed.federation.channel.clock import MembersTime
from hpcfed.results.server import RowsUse

if TYPE_CHECKING:  # most runs have no server's model, and do not load its code
    from hpcfed.server.report import LearningReport

OnTrained = Callable[[np.ndarray, Tensor], None]
"""Takes positions of this rank's clients, and the rows that they trained."""


@dataclass(frozen=True)
class Downloaded:
    """What this rank's members were sent, and what the server had before packing."""

    received: Tensor
    """[members, columns], as members received it."""
    servers: Tensor | None = None
    """The server's own row or rows before packing; None: not packed."""

    def only(self, columns: Tensor | slice | None) -> "Downloaded":
        """Return some columns of it; None: all of them."""
        if columns is None:
            return self
        servers = None if self.servers is None else self.servers[..., columns]
        return Downloaded(self.received[:, columns], servers)


@dataclass
class RoundLog:
    """Figures of one round that are recorded, added up while the method runs.

    Figures stay on the device until the recorder reads them: reading one earlier would
    make the host wait for the GPU in the middle of a round.
    """

    cohort_size: int = 0
    """Members of the cohort that have training data."""
    losses: list[Losses] = field(default_factory=list)
    """Training losses of this rank's clients, of each training of the round."""
    trained_samples: int = 0
    """Samples in steps of this rank's clients, without `finetuned_samples`."""
    trained_steps: int = 0
    """Number of these steps."""
    trained_positions: Tensor | int = 0
    """Positions of texts in these steps, with padding; 0 if samples are not texts."""
    learnt_tokens: Tensor | int = 0
    """How many of these positions have a loss."""
    train_flops: Tensor | float = 0.0
    """Floating-point operations of these steps, and of Fisher information."""
    finetuned_samples: int = 0
    """Samples in steps that clients take in an evaluation, before they are judged."""
    finetune_flops: Tensor | float = 0.0
    """Floating-point operations of these."""
    work: list[tuple[np.ndarray, Work]] = field(default_factory=list)
    """Clients of this rank, by position, and what they did, for each training."""
    bytes_up: int = 0
    """Bytes that clients of all ranks send to the server, if all send alike."""
    bytes_up_here: Tensor | int = 0
    """Bytes that this rank's clients send, if each chooses what it sends."""
    bytes_down: int = 0
    """Bytes that the server sends to clients of all ranks."""
    update_norms: Tensor | None = None
    """Norms of the updates that this rank's members have uploaded."""
    excluded: set[int] = field(default_factory=set)
    """Ids of this rank's clients whose update was not finite, and was left out."""
    selected: np.ndarray | None = None
    """Ids of clients whose uploads were selected; None if a method never selects."""
    arrived: np.ndarray | None = None
    """Ids of the members of all ranks whose uploads arrived in time; None: all."""
    virtual_seconds: float = math.nan
    """Virtual time from the run's start to this round's end; NaN without a clock."""
    staleness: float = math.nan
    """Mean number of versions by which the round's uploads were behind."""
    clip_norm: Tensor | float = math.nan
    """Norm to which this round's updates were clipped."""
    epsilon: float = math.nan
    """Privacy spent after this round."""
    times: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Every member's virtual times to record, by name; see `results/format.py`."""
    server_report: "LearningReport | None" = None
    """What training the server's model took, if it has learnt after this round, or if
    clients went on meanwhile and its rows are used after this round.
    """
    rows_use: RowsUse | None = None
    """When and after which wait the rows of such a learning are used."""
    measured: dict[str, Tensor | float] = field(default_factory=dict)
    """Any other figure of the table in `results/series.py`, by its name there."""

    @property
    def longest_steps(self) -> int:
        """Steps of the client of this rank that has taken the most."""
        if len(self.work) == 1:
            return self.work[0][1].longest
        longest = 0
        if self.work:
            clients = np.concatenate([clients for clients, _ in self.work])
            steps = np.concatenate([work.steps for _, work in self.work])
            # Exact: float64 holds whole numbers far beyond any count of steps.
            longest = int(np.bincount(clients, steps).max(initial=0))
        return longest

    def add_work(self, clients: np.ndarray, work: Work, flops: Tensor | float) -> None:
        """Count what clients of this rank, by position, have done."""
        self.work.append((clients, work))
        self.trained_samples += work.samples
        self.trained_steps += work.total
        self.train_flops = self.train_flops + flops

    def add_losses(self, losses: Losses) -> None:
        """Add the losses of some clients, each over its number of samples or tokens."""
        self.losses.append(losses)

    @property
    def loss_sum(self) -> float:
        """Sum of training losses over samples, or tokens, of this rank's clients."""
        return self.summed_losses()[0]

    @property
    def samples_seen(self) -> int:
        """Number of these samples or tokens."""
        return self.summed_losses()[1]

    def summed_losses(self) -> tuple[float, int]:
        """Return the sum of losses over samples, or tokens, and their number; the host
        waits for the device.

        A loss that is not finite is ignored: its update is left out, too.
        """
        loss_sum: Tensor | float = 0.0
        samples_seen: Tensor | int = 0
        for losses in self.losses:
            # On the host: a GPU would take seven launches for a few numbers.
            mean, seen = losses.mean.cpu(), losses.seen.cpu()
            of_clients = (mean * seen).sum()
            if not math.isfinite(of_clients):
                seen = seen * (mean.abs() < math.inf)
                # NaN × 0 is NaN, so a loss that is ignored has to be set to 0 as well.
                of_clients = (mean.nan_to_num() * seen).sum()
            loss_sum = loss_sum + of_clients
            samples_seen = samples_seen + seen.sum()
        return float(loss_sum), int(samples_seen)


@dataclass
class RoundInFlight:
    """What the federation must remember about a round until it ends; not recorded."""

    downloaded: dict[str, Downloaded] = field(default_factory=dict)
    """What members here were sent until they upload, by name; the model's is ""."""
    sent_row: Tensor | None = None
    """The row that the last download sent to all members; None: each got its own."""
    received: Tensor | None = None
    """What the server received by the last upload of a private run. It may take one
    mean, and only of these rows.
    """
    uploads: int = 0
    """Uploads of this round so far, such as rows and control variates."""
    downloads: int = 0
    """Downloads of this round so far."""
    weighed: bool = False
    """Whether a user's method has read the weights of the round's clients."""
    clock: MembersTime | None = None
    """Virtual time of the round's members; None without a clock or without members."""
    wave: int = 0
    """Number of the wave that is training. A client in several waves of one round draws
    different random numbers in each.
    """
    on_trained: OnTrained | None = None
    """Gets the rows that local training leaves behind; the recorder passes it in."""
