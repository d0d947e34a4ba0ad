"""Replace the uploads of attackers by forged ones.

Attacks that copy or mirror benign clients need one in the round. If all sampled clients
are attackers, they upload what they trained, and the run says so once. The other
attacks always act.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from hpcfed.attacks import ipm, mimic, noise, sign_flip
from hpcfed.attacks.view import AttackView
from hpcfed.errors import remark
from hpcfed.federation.aggregation import Aggregation
from hpcfed.federation.channel.channel import Upload
from hpcfed.options import RunConfig
from hpcfed.options.malicious import ATTACKS
from hpcfed.runtime.collectives import Collectives

FORGERS: dict[str, Callable[[AttackView], Tensor]] = {
    "mimic": mimic.forge,
    "ipm": ipm.forge,
    "sign-flip": sign_flip.forge,
    "noise": noise.forge,
}


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
