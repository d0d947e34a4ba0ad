"""Replace the uploads of attackers by forged ones.

Attacks that copy or mirror benign clients need one in the round. If all sampled clients
are attackers, they upload what they trained, and the run says so once. The other
attacks always act.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from hpcfed.errors import remark
from hpcfed.federation.aggregation import Aggregation
from hpcfed.federation.channel.channel import Upload
from hpcfed.federation.cohort import Cohort, Sent
from hpcfed.options import RunConfig
from hpcfed.options.malicious import ATTACKS
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


def flip_signs(view: AttackView) -> Tensor:
    """Return w − strength × the attacker's own update, as if it maximised its loss."""
    # It needs no other client, so it works even if all sampled clients are malicious.
    start, update = view.own_updates()
    return start - view.strength * update


def add_noise(view: AttackView) -> Tensor:
    """Return an honest upload plus Gaussian noise, strength × as large as the attacker's
    update, so that one strength suits any network.
    """
    start, update = view.own_updates()
    noise = randomness.normal(view.keys(), update.shape[1])
    size = view.strength * view.own_sizes()
    return start + update + size * noise.to(update.dtype)


def mirror_benign(view: AttackView) -> Tensor:
    """Return w − ε × the mean update of the round's benign clients: inner-product
    manipulation (Xie et al. 2020).
    """
    start, _ = view.own_updates()
    # With ε = 1 and equally many attackers and benign clients, w does not move.
    return start - view.strength * view.benign_update()


def copy_benign(view: AttackView) -> Tensor:
    """Return copies of benign uploads, which then have too much weight: mimic
    (Karimireddy et al. 2022).

    Our reading: in every round each attacker draws anew which client it copies.
    """
    # All ranks draw the same numbers: an attacker may copy a client of another rank.
    victims = view.generator().choice(view.benign, len(view.attackers))
    return view.copies(victims)


FORGERS: dict[str, Callable[[AttackView], Tensor]] = {
    "mimic": copy_benign,
    "ipm": mirror_benign,
    "sign-flip": flip_signs,
    "noise": add_noise,
}
"""What attackers upload, by the attack's name."""


@dataclass
class Tampering:
    """Replaces the uploads of malicious clients."""

    config: RunConfig
    attackers: np.ndarray
    """Ids of all malicious clients of the federation."""
    collectives: Collectives
    phase: str = field(default="attack", init=False)
    _told_of_no_benign: bool = field(default=False, init=False)

    def __call__(self, upload: Upload) -> Upload:
        """Replace attackers' rows by forged ones."""
        rows, sent, cohort = upload.rows, upload.sent, upload.cohort
        if sent is not None:
            # The server never sees columns that a client does not send.
            rows = rows.where(sent.columns(), upload.start)
        malicious = np.isin(cohort.clients, self.attackers)
        if not malicious.any():
            return replace(upload, rows=rows)
        if malicious.all() and ATTACKS[self.config.attack].reads_others:
            self._tell_of_no_benign(cohort.round)
            return replace(upload, rows=rows)
        view = AttackView(
            rows=rows,
            start=upload.start,
            cohort=cohort,
            attackers=np.flatnonzero(malicious),
            benign=np.flatnonzero(~malicious),
            strength=self.config.attack_strength,
            seed=self.config.seed,
            collectives=self.collectives,
            mean=Aggregation(self.config, self.collectives).mean,
            sent=sent,
        )
        # `index_copy` returns a new tensor: clients keep the rows that they trained.
        forged = FORGERS[self.config.attack](view)
        return replace(upload, rows=rows.index_copy(0, view.attackers_here, forged))

    def _tell_of_no_benign(self, round: int) -> None:
        if self.collectives.world.is_root and not self._told_of_no_benign:
            remark(
                f"hpcfed: all clients of round {round + 1} are attackers, and "
                f"{self.config.attack} needs benign ones: in such rounds they upload "
                "what they trained"
            )
        self._told_of_no_benign = True


def tampering(
    config: RunConfig, attackers: np.ndarray, collectives: Collectives
) -> Tampering | None:
    """Return the stage that forges uploads; None if all of them are honest."""
    if config.attack not in FORGERS or not len(attackers):
        return None
    return Tampering(config, attackers, collectives)
