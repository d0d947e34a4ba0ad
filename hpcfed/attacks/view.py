"""A round as its attackers see it."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hpcfed.federation.cohort import Cohort, Sent
from hpcfed.runtime import randomness
from hpcfed.runtime.collectives import Collectives
from hpcfed.runtime.device import on_device


@dataclass(frozen=True)
class AttackView:
    """What attackers know of a round: they see all uploads and share what they know."""

    rows: Tensor
    """Trained rows of this rank's members of the cohort."""
    start: Tensor
    """What the server sent each of them; rows − start is the update that it sees."""
    cohort: Cohort
    attackers: np.ndarray
    """Positions of the malicious members in the whole cohort."""
    benign: np.ndarray
    """Positions of all other members."""
    strength: float
    seed: int
    collectives: Collectives
    mean: Callable[[Tensor, Cohort], Tensor]
    """Takes the mean of rows over all ranks, with the weights of the cohort."""
    sent: Sent | None = None
    """Which columns each member sends; None: all. Elsewhere rows equal `start`."""

    @property
    def attackers_here(self) -> Tensor:
        """Indices of the attackers among this rank's members."""
        here, _ = self.cohort.only(self.attackers)
        return on_device(here, self.rows.device)

    def own_updates(self) -> tuple[Tensor, Tensor]:
        """Return what this rank's attackers were sent, and their honest updates."""
        at = self.attackers_here
        start = self.start[at]
        return start, self.rows[at] - start

    def own_sizes(self) -> Tensor:
        """Return the RMS of each attacker's honest update here, [attackers, 1]."""
        _, update = self.own_updates()
        squares = update.square()
        if self.sent is None:
            return squares.mean(1, keepdim=True).sqrt()
        # The update is 0 in columns that are not sent: take the mean over the others.
        sent = self.sent.columns()[self.attackers_here]
        num_columns = sent.sum(1, keepdim=True).clamp(min=1)
        sums = squares.sum(1, keepdim=True)
        return (sums / num_columns).sqrt()

    def benign_update(self) -> Tensor:
        """Return, for each column, the unweighted mean update of the benign members
        that send it; 0 if none does.

        Leave out members that have diverged, as the server does, unless all have.
        """
        update = self._mean_update(self.benign)
        # Checking the mean is cheaper than checking all rows; all ranks agree on it.
        if bool(update.isfinite().all()):
            return update
        finite = self.rows.isfinite().all(1).cpu().numpy()
        everyones = self.collectives.allgather(self.cohort.chosen[finite])
        finite_members = np.concatenate(everyones)
        sound = np.intersect1d(self.benign, finite_members)
        if not len(sound):
            return update
        return self._mean_update(sound)

    def _mean_update(self, members: np.ndarray) -> Tensor:
        here, cohort = self.cohort.only(members)
        at = on_device(here, self.rows.device)
        updates = self.rows[at] - self.start[at]
        if self.sent is None:
            return self.mean(updates, cohort.equally())
        # One collective for the updates and for who sends which group of columns.
        groups = self.sent.groups[at].to(updates.dtype)
        both = torch.cat([updates, groups], 1)
        mean = self.mean(both, cohort.equally())
        widths = [updates.shape[1], groups.shape[1]]
        update, share = mean.split(widths)
        # The mean over all members, divided by the share that sent the column.
        by_column = share[self.sent.group_of]
        return torch.where(by_column > 0, update / by_column, 0)

    def copies(self, victims: np.ndarray) -> Tensor:
        """Return the victim's row for each attacker on this rank. `victims` holds the
        victims' positions in the cohort, for all attackers of the cohort.
        """
        ranks = self.cohort.ranks()
        here = self.collectives.world.role_rank
        # A victim may be on another rank: each rank sends the rows of its victims.
        of_this_rank = victims[ranks[victims] == here]
        wanted = np.searchsorted(self.cohort.chosen, of_this_rank)
        rows = self.rows[on_device(wanted, self.rows.device)]
        senders, receivers = ranks[victims], ranks[self.attackers]
        return self.collectives.relocate(rows, senders, receivers)

    def generator(self) -> np.random.Generator:
        """Return a generator for decisions that all ranks must make alike."""
        return randomness.generator(self.seed, "attack", self.cohort.round)

    def keys(self) -> Tensor:
        """Return a key for each attacker of this rank, for its own random numbers."""
        here = np.intersect1d(self.cohort.chosen, self.attackers)
        ids = on_device(self.cohort.clients[here], self.rows.device)
        return randomness.client_keys(self.seed, "attack", self.cohort.round, ids)
