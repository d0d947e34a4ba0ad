"""The clients of a round, on this rank and on the others."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from hpcfed.errors import Diverged
from hpcfed.federation.log import RoundInFlight, RoundLog
from hpcfed.kernels.rows import measures, row_distances
from hpcfed.options.privacy import Weighing
from hpcfed.runtime.collectives import Collectives
from hpcfed.runtime.device import on_device


@dataclass(frozen=True)
class Cohort:
    """The clients that take part in a round, or some of them."""

    round: int
    clients: np.ndarray
    """Ids of the whole cohort, ascending."""
    weights: np.ndarray
    """nᵢ / Σn of the whole cohort, or what --weights makes of it; they sum to one."""
    here: np.ndarray
    """The members on this rank, as positions in `Federation.clients`."""
    chosen: np.ndarray
    """The members on this rank, as positions in `clients` and `weights`."""
    per_rank: list[np.ndarray]
    """`chosen` of every worker rank."""
    log: RoundLog = field(default_factory=RoundLog, compare=False)
    """What the round has done so far; cohorts derived from this one share it."""
    in_flight: RoundInFlight = field(default_factory=RoundInFlight, compare=False)
    """What is between clients and the server; shared in the same way."""

    def only(self, members: np.ndarray) -> tuple[np.ndarray, "Cohort"]:
        """Return the cohort of the members at these ascending positions, with weights
        that sum to one again.

        The first result says which of this rank's members they are, counted from 0.
        """
        # Positions, because rows may be on a GPU, where a mask would make the host
        # wait.
        rows = np.flatnonzero(np.isin(self.chosen, members))
        # Weights may miss one by a rounding, and must not be rescaled: selecting the
        # whole cohort equals FedAvg bit for bit.
        if len(members) == len(self.clients):
            return rows, self
        per_rank = []
        for chosen in self.per_rank:
            remaining = chosen[np.isin(chosen, members)]
            # Positions are renumbered in the smaller cohort.
            per_rank.append(np.searchsorted(members, remaining))
        fewer = Cohort(
            round=self.round,
            clients=self.clients[members],
            weights=shares(self.weights[members]),
            here=self.here[rows],
            chosen=np.searchsorted(members, self.chosen[rows]),
            per_rank=per_rank,
            log=self.log,
            in_flight=self.in_flight,
        )
        return rows, fewer

    def others(self, num_clients: int) -> np.ndarray:
        """Return which of this rank's `num_clients` clients do not take part."""
        return np.setdiff1d(np.arange(num_clients), self.here)

    def equally(self) -> "Cohort":
        """Return the same clients with equal weights."""
        ones = np.ones(len(self.clients))
        return replace(self, weights=shares(ones))

    def ranks(self) -> np.ndarray:
        """Return the worker rank of every member."""
        ranks = np.empty(len(self.clients), np.int64)
        for rank, members in enumerate(self.per_rank):
            ranks[members] = rank
        return ranks


@dataclass(frozen=True)
class Sent:
    """Which groups of columns each member here sends, if they differ."""

    groups: Tensor
    """[members, groups], True where a group is sent."""
    group_of: Tensor
    """The group that every column belongs to."""

    def columns(self) -> Tensor:
        """Return [members, columns], True where a column is sent."""
        return self.groups[:, self.group_of]


def client_weights(sizes: np.ndarray, by: Weighing) -> np.ndarray:
    """Return the relative weights of clients with `sizes` samples. Clients without data
    have trained nothing, and weigh 0.
    """
    # Not normalised: `shares` divides by the total of whichever clients take part.
    return sizes if by == "samples" else (sizes > 0).astype(np.float64)


def shares(sizes: np.ndarray) -> np.ndarray:
    """Return nᵢ / Σn; without data equal shares, so that equal rows stay the same."""
    total = sizes.sum()
    if not total:
        return np.full(len(sizes), 1 / max(1, len(sizes)))
    return sizes / total


def member_rows(
    rows: Tensor, cohort: Cohort, members: np.ndarray
) -> tuple[Tensor, Cohort]:
    """Return the rows of some members of the cohort, and the cohort of only these."""
    if len(members) == len(cohort.clients):
        return rows, cohort
    here, fewer = cohort.only(members)
    return rows[on_device(here, rows.device)], fewer


UPDATE_NUMBERS = 2**24
"""How many numbers of updates are computed at a time: 64 MiB in float32."""


def blocks(rows: Tensor) -> Iterator[slice]:
    """Yield slices of a few members each, so that no second matrix of all rows is
    needed; without members, yield one empty slice.
    """
    size = max(1, UPDATE_NUMBERS // max(1, rows.shape[1]))
    # At least one slice: the size of a packed update is known even without members.
    for first in range(0, max(1, len(rows)), size):
        yield slice(first, first + size)


def update_norms(start: Tensor, rows: Tensor, sent: Sent | None) -> Tensor:
    """Return the norm of each member's update, its row minus what the server sent it.
    Columns that a member does not send are not part of the update.
    """
    if sent is None and measures(rows, start):
        return row_distances(rows, start)
    norms = []
    for block in blocks(rows):
        updates = rows[block] - start[block]
        if sent is not None:
            updates = updates.where(sent.columns()[block], 0)
        norms.append(torch.linalg.vector_norm(updates, dim=1))
    return torch.cat(norms)


# Updates that have diverged: whose rows are not finite, and what happens to them.
#
# With --on-bad-update exclude they are left out, and the round's log names their clients.
# With stop they end the run.


NAMED = 8
"""How many clients a message names; of more, it names the first."""
ADVICE = "try a smaller --lr, --clip 10, or less noise if the run is private"


def all_finite(row: Tensor) -> bool:
    """Tell whether all numbers of a row are finite; the host waits for it."""
    # One that is not makes the sum neither. Only a sum that overflows needs a look at
    # every number, which takes a GPU several launches.
    return isfinite(row.sum().item()) or bool(torch.isfinite(row).all())


def finite_members(
    rows: Tensor, cohort: Cohort, collectives: Collectives, *, stop: bool
) -> np.ndarray:
    """Return the positions of the cohort's members whose rows are finite, the same on
    every rank.

    The log counts the others as excluded. Raises an error if `stop` forbids that, or if
    no member would be left.
    """
    finite = torch.isfinite(rows).all(1).cpu().numpy()
    # Positions of finite members, not rows: a few numbers per client travel.
    everyones = collectives.allgather(cohort.chosen[finite])
    # All ranks know about all members, so either all raise or none does.
    members = np.sort(np.concatenate(everyones))
    bad = np.delete(cohort.clients, members)
    if len(bad) and (stop or not len(members)):
        raise divergence(bad, cohort.round)
    # The log covers only this rank; the recorder adds up all ranks.
    bad_here = cohort.clients[cohort.chosen[~finite]]
    cohort.log.excluded.update(bad_here.tolist())
    return members


def count_excluded(
    bad: set[int], cohort: Cohort, collectives: Collectives, *, stop: bool
) -> None:
    """Count clients of this rank as excluded, or `stop`, on every rank."""
    everyones = set().union(*collectives.allgather(bad))
    if stop and everyones:
        raise divergence(np.array(sorted(everyones)), cohort.round)
    cohort.log.excluded.update(bad)


def without_diverged(
    rows: Tensor, before: Tensor, ids: np.ndarray, cohort: Cohort, *, stop: bool
) -> Tensor:
    """Return the rows of clients of this rank. If training has diverged, a row is taken
    from `before`, and the log counts its client as excluded.
    """
    finite = torch.isfinite(rows).all(1)
    # The usual case copies nothing.
    if bool(finite.all()):
        return rows
    bad = ids[~finite.cpu().numpy()]
    # A client that was broken before this round has nothing to go back to.
    sound_before = bool(torch.isfinite(before[~finite]).all())
    if stop or not sound_before:
        raise divergence(bad, cohort.round)
    cohort.log.excluded.update(bad.tolist())
    return rows.where(finite[:, None], before)


def divergence(clients: np.ndarray, round: int) -> ArithmeticError:
    """Return the error that names clients whose updates are not finite."""
    return _error("updates that are not finite", clients, round)


def lost_clients(clients: np.ndarray, round: int) -> ArithmeticError:
    """Return the error that names clients whose models have become useless."""
    return _error("personal models whose loss is not finite", clients, round)


def lost_model(round: int) -> ArithmeticError:
    """Return the error about a global model that has become useless."""
    return Diverged(
        f"the loss of the global model is not finite in round {round + 1}; {ADVICE}"
    )


def _error(what: str, clients: np.ndarray, round: int) -> ArithmeticError:
    named = ", ".join(map(str, clients[:NAMED]))
    if len(clients) > NAMED:
        named += ", …"
    return Diverged(f"{what}, of clients {named} in round {round + 1}; {ADVICE}")
