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
    """What attackers know of a round: they see all uploads, and share what they know."""

    rows: Tensor
    """This rank's members of the cohort as they trained."""
    start: Tensor
    """What the server had sent to each of them: rows − start is an update as the server
    sees it.
    """
    cohort: Cohort
    attackers: np.ndarray
    """Positions of the malicious members in the whole cohort."""
    benign: np.ndarray
    """Positions of all others."""
    strength: float
    seed: int
    collectives: Collectives
    mean: Callable[[Tensor, Cohort], Tensor]
    """Takes the mean of rows over all ranks, by the weights of their cohort."""
    sent: Sent | None = None
    """Which columns each of them sends, where not all; elsewhere rows are as `start`."""

    @property
    def attackers_here(self) -> Tensor:
        """The attackers among this rank's members, counted from 0."""
        here, _ = self.cohort.only(self.attackers)
        return on_device(here, self.rows.device)

    def own_updates(self) -> tuple[Tensor, Tensor]:
        """Return what this rank's attackers were sent, and their honest updates."""
        at = self.attackers_here
        start = self.start[at]
        return start, self.rows[at] - start

    def own_sizes(self) -> Tensor:
        """Return the root mean square of what each attacker of this rank would honestly
        send, [attackers, 1].
        """
        _, update = self.own_updates()
        squares = update.square()
        if self.sent is None:
            return squares.mean(1, keepdim=True).sqrt()
        # The update is 0 in columns that are not sent: the mean is over the others.
        sent = self.sent.columns()[self.attackers_here]
        num_columns = sent.sum(1, keepdim=True).clamp(min=1)
        sums = squares.sum(1, keepdim=True)
        return (sums / num_columns).sqrt()

    def benign_update(self) -> Tensor:
        """Return the mean update of all benign members that send a column, each counts
        alike; 0 where none does.

        Members that have diverged do not count, as long as there are others: the server
        leaves them out, too.
        """
        update = self._mean_update(self.benign)
        # One row to look at, not all of them; all ranks find the same.
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
        # Who sends a group of columns travels with the updates, in one collective.
        groups = self.sent.groups[at].to(updates.dtype)
        both = torch.cat([updates, groups], 1)
        mean = self.mean(both, cohort.equally())
        widths = [updates.shape[1], groups.shape[1]]
        update, share = mean.split(widths)
        # The mean over all members, divided by the share that sent the column.
        by_column = share[self.sent.group_of]
        return torch.where(by_column > 0, update / by_column, 0)

    def copies(self, victims: np.ndarray) -> Tensor:
        """Return for each attacker of this rank the row of its victim, whose position
        in the cohort `victims` has for every attacker of the cohort.
        """
        ranks = self.cohort.ranks()
        here = self.collectives.world.role_rank
        # A victim may be on another rank: each rank sends the rows of its own.
        of_this_rank = victims[ranks[victims] == here]
        wanted = np.searchsorted(self.cohort.chosen, of_this_rank)
        rows = self.rows[on_device(wanted, self.rows.device)]
        senders, receivers = ranks[victims], ranks[self.attackers]
        return self.collectives.relocate(rows, senders, receivers)

    def generator(self) -> np.random.Generator:
        """Return random numbers for what all ranks decide alike."""
        return randomness.generator(self.seed, "attack", self.cohort.round)

    def keys(self) -> Tensor:
        """Return a key for each attacker of this rank, for its own random numbers."""
        here = np.intersect1d(self.cohort.chosen, self.attackers)
        ids = on_device(self.cohort.clients[here], self.rows.device)
        return randomness.client_keys(self.seed, "attack", self.cohort.round, ids)
