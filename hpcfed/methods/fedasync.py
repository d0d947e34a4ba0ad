"""FedAsync (Xie et al. 2019): each client's row x is mixed in as it arrives: w ← (1 − α
s(d)) w + α s(d) x, where d is how many versions it is behind.

Algorithm 1. Every upload makes a version. s is constant 1, a hinge, which is 1 up to d =
b and then 1 / (a (d − b) + 1), or polynomial, (1 + d)^−a; with b = 4, and a = 10 and 0.5
as in the paper. ρ of its local objective, loss + ρ/2 ‖θ − w‖² with the w that the client
was given, is --prox-mu, as FedProx's. Uploads count alike, however many samples a client
has. Running statistics of batch norm are mixed as all columns are.

An upload that is not finite makes a version that is the one before.
"""

from hpcfed.config import option
from hpcfed.methods import _asynchronous, fedavg
from hpcfed.methods._asynchronous import State, Versions, Wave
from hpcfed.methods._interface import Cohort, Federation, Tensor

EXTENDS = fedavg


class Options(_asynchronous.Options):
    mixing: float = option(
        0.6, "α: share of an upload that is not stale in the next row", gt=0, le=1
    )
    prox_mu: float = option(
        0.0,
        "ρ: how strongly the row that a client was given draws its own, as in 0.005",
        ge=0,
    )


def init(fed: Federation[Options]) -> State:
    return _asynchronous.begin(fed)


def round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    # Nobody will ever arrive.
    if not fed.num_holders:
        return state
    plan = _asynchronous.plan(fed, state, cohort, buffer=1)
    versions, w, heard = plan.versions, state.w, 0
    for wave in plan.waves:
        _, rows = _asynchronous.upload(fed, wave, versions, fed.options.prox_mu)
        made, finite = mixed(fed, w, rows, wave)
        w = made[max(made)]
        heard += finite
        versions = _asynchronous.kept({**versions, **made}, wave)
    return State(w, **_asynchronous.end(plan, fed, cohort, versions, heard))


def mixed(
    fed: Federation[Options], w: Tensor, rows: Tensor, wave: Wave
) -> tuple[Versions, int]:
    """Return a version for every upload of a wave, and how many of them were finite."""
    everyone = range(len(wave.order))
    versions = _mixed(fed, w, rows, wave, set(everyone))
    # As in `fed.mean`: look at what was made, at all rows only if it tells.
    if bool(versions[max(versions)].isfinite().all()):
        return versions, len(everyone)
    finite = fed.finite_members(rows, wave.cohort)
    return _mixed(fed, w, rows, wave, set(finite.tolist())), len(finite)


def _mixed(
    fed: Federation[Options], w: Tensor, rows: Tensor, wave: Wave, members: set[int]
) -> Versions:
    """Mix in the uploads of some of the wave's members."""
    import torch

    # Every rank fills in its own clients' rows: adding zeros rounds nothing, so that all
    # ranks mix the same rows in the same order as one rank does.
    uploads = rows.new_zeros(len(wave.order), rows.shape[1])
    uploads[torch.from_numpy(wave.cohort.chosen).to(rows.device)] = rows
    uploads = fed.sum(uploads)
    versions = {}
    with fed.timed("aggregate"):
        for number, member in enumerate(wave.order.tolist()):
            if member in members:
                share = fed.options.mixing * float(wave.weights[member])
                w = torch.lerp(w, uploads[member], share, out=uploads[member])
            versions[wave.first + number + 1] = w
    return versions
