"""Updates that have diverged: whose rows are not finite, and what happens to them.

With --on-bad-update exclude they are left out, and the round's log names their clients.
With stop they end the run.
"""

import numpy as np
import torch
from torch import Tensor

from hpcfed.errors import Diverged
from hpcfed.federation.cohort import Cohort
from hpcfed.runtime.collectives import Collectives

NAMED = 8
"""How many clients a message names; of more, it names the first."""
ADVICE = "try a smaller --lr, --clip 10, or less noise if the run is private"


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


def exclude(
    bad: set[int], cohort: Cohort, collectives: Collectives, *, stop: bool
) -> None:
    """Count clients of this rank as excluded, or `stop`, on every rank."""
    everyones = set().union(*collectives.allgather(bad))
    if stop and everyones:
        raise divergence(np.array(sorted(everyones)), cohort.round)
    cohort.log.excluded.update(bad)


def revert_diverged(
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
