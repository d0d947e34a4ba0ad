"""A round as its attackers see it, and how their forged rows take the place of their
own.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hpcfed.attacks import NEED_BENIGN, ipm, mimic, noise, sign_flip
from hpcfed.federation.cohort import Cohort, Sent
from hpcfed.runtime import randomness
from hpcfed.runtime.collectives import Collectives
from hpcfed.runtime.device import on_device


@dataclass(frozen=True)
class Scene:
    rows: Tensor
    """This rank's members of the cohort as they trained."""
    start: Tensor
    """What the server had sent to each of them: rows − start is an update as the server
    sees it.
    """
    cohort: Cohort
    attackers: np.ndarray
    """Of the whole cohort, by position."""
    benign: np.ndarray
    """All others."""
    strength: float
    seed: int
    collectives: Collectives
    mean: Callable[[Tensor, Cohort], Tensor]
    """Of rows over all ranks, by the weights of their cohort."""
    sent: Sent | None = None
    """Which parts each of them sends, where not all of it; elsewhere rows are as
    `start`.
    """

    @property
    def attackers_here(self) -> Tensor:
        """The attackers among this rank's members."""
        return on_device(self.cohort.only(self.attackers)[0], self.rows.device)

    def own(self) -> tuple[Tensor, Tensor]:
        """What the attackers of this rank were sent, and their honest updates."""
        at = self.attackers_here
        return self.start[at], self.rows[at] - self.start[at]

    def own_size(self) -> Tensor:
        """The root mean square of what each attacker of this rank would honestly send,
        [attackers, 1].
        """
        _, update = self.own()
        squares = update.square()
        if self.sent is None:
            return squares.mean(1, keepdim=True).sqrt()
        columns = self.sent.columns()[self.attackers_here].sum(1, keepdim=True)
        return (squares.sum(1, keepdim=True) / columns.clamp(min=1)).sqrt()

    def benign_update(self) -> Tensor:
        """The mean over all benign members that send a column, each counts alike; 0
        where nobody does.

        Members that have diverged do not count, as long as there are others: the server
        leaves them out, too.
        """
        update = self._mean_update(self.benign)
        if bool(update.isfinite().all()):
            return update
        finite = self.rows.isfinite().all(1).cpu().numpy()
        everyones = np.concatenate(
            self.collectives.allgather(self.cohort.chosen[finite])
        )
        sound = np.intersect1d(self.benign, everyones)
        return self._mean_update(sound) if len(sound) else update

    def _mean_update(self, members: np.ndarray) -> Tensor:
        here, cohort = self.cohort.only(members)
        at = on_device(here, self.rows.device)
        updates = self.rows[at] - self.start[at]
        if self.sent is None:
            return self.mean(updates, cohort.equally())
        parts = self.sent.parts[at].to(updates.dtype)
        update, share = self.mean(
            torch.cat([updates, parts], 1), cohort.equally()
        ).split([updates.shape[1], parts.shape[1]])
        by_column = share[self.sent.part_of]
        return torch.where(by_column > 0, update / by_column, 0)

    def copies(self, of: np.ndarray) -> Tensor:
        """For each attacker of this rank the row of another member; `of` are their
        positions, one for each attacker.
        """
        ranks, here = self.cohort.ranks(), self.collectives.world.role_rank
        wanted = np.searchsorted(self.cohort.chosen, of[ranks[of] == here])
        rows = self.rows[on_device(wanted, self.rows.device)]
        return self.collectives.relocate(rows, ranks[of], ranks[self.attackers])

    def generator(self) -> np.random.Generator:
        """Random numbers for what all ranks decide alike."""
        return randomness.generator(self.seed, "attack", self.cohort.round)

    def keys(self) -> Tensor:
        """Of this rank's attackers, for their own random numbers."""
        ids = self.cohort.clients[np.intersect1d(self.cohort.chosen, self.attackers)]
        return randomness.client_keys(
            self.seed, "attack", self.cohort.round, on_device(ids, self.rows.device)
        )


_FORGES: dict[str, Callable[[Scene], Tensor]] = {
    "mimic": mimic.forge,
    "ipm": ipm.forge,
    "sign-flip": sign_flip.forge,
    "noise": noise.forge,
}


def attacked(attack: str, scene: Scene) -> Tensor:
    """What this rank's members upload."""
    if (
        attack not in _FORGES
        or not len(scene.attackers)
        or (attack in NEED_BENIGN and not len(scene.benign))
    ):
        return scene.rows
    forged = _FORGES[attack](scene)
    return scene.rows.index_copy(0, scene.attackers_here, forged)
