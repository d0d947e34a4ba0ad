"""FedAsync (Xie et al. 2019): each client's row x is mixed in as it arrives: w ← (1 − α
s(d)) w + α s(d) x, where d is how many versions it is behind.

Algorithm 1. Every upload makes a version. s is constant 1, a hinge, which is 1 up to d =
b and then 1 / (a (d − b) + 1), or polynomial, (1 + d)^−a. As in the paper b = 4, and a
is 10 for the hinge and 0.5 for the polynomial. Here a fresh upload has d = 0 and counts
in full, because s should be 1 for it. As Algorithm 1 counts, a fresh upload has d = t −
τ = 1, and all others have one more: --staleness-fresh 1.

The local objective is loss + ρ/2 ‖θ − w‖², with the w that the client was sent; ρ is
--prox-mu, as in FedProx. Uploads count the same, however many samples a client has.
Running statistics of batch norm are mixed like all other columns.

An upload that is not finite makes a version that equals the one before.
"""

import numpy as np
import torch

from hpcfed.errors import UserError
from hpcfed.methods import _asynchronous, _waves, fedavg
from hpcfed.methods._asynchronous import State, Versions, Wave
from hpcfed.methods._interface import Cohort, Federation, Tensor
from hpcfed.methods._waves import Received
from hpcfed.options import RunConfig, option
from hpcfed.runtime.device import on_device

EXTENDS = fedavg


class Options(_asynchronous.Options):
    weighs = "uniform"

    mixing: float = option(
        0.6, "α: share of an upload that is not stale in the next row", gt=0, le=1
    )
    prox_mu: float = option(
        0.0,
        "ρ: how strongly the row that a client was given draws its own, as in 0.005",
        ge=0,
    )
    staleness_fresh: int = option(
        0,
        "d of an upload that no version is ahead of: 0, so that s is 1; or 1, as the "
        "paper's Algorithm 1 counts",
        ge=0,
        le=1,
        needs=_asynchronous.STALENESS,
    )

    def check(self, config: RunConfig) -> None:
        super().check(config)
        if config.weights == "samples":
            raise UserError(
                "--weights samples: fedasync mixes in one upload at a time, so there is "
                "nothing to weigh it against; use --method fedbuff"
            )

    def staleness_weights(self, staleness: np.ndarray) -> np.ndarray:
        return super().staleness_weights(staleness + self.staleness_fresh)


def init(fed: Federation[Options]) -> State:
    return _asynchronous.begin(fed, buffer=1)


def round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    # Without data no client ever uploads.
    if not fed.num_holders:
        return state
    waves = _asynchronous.waves(fed, state, cohort, buffer=1)
    versions = _asynchronous.rows_of(state, buffer=1)
    w = state.w
    flags, heard = [], w.new_zeros(())
    for wave in waves:
        received = _waves.receive(fed, wave, versions, fed.options.prox_mu)
        made, num_finite = mixed(fed, w, received, wave)
        w = made[max(made)]
        versions = _waves.kept({**versions, **made}, wave)
        flags.append((wave, received.finite))
        heard = heard + num_finite
    # Plan the next round while the device is still computing.
    later = _asynchronous.following(fed, state, cohort.round + 1, buffer=1)
    _waves.exclude(fed, cohort, flags, heard)
    return State(w, **_asynchronous.after(state, versions, *later, buffer=1))


def mixed(
    fed: Federation[Options], w: Tensor, received: Received, wave: Wave
) -> tuple[Versions, Tensor]:
    """Return a version for every upload of a wave, and the number of finite uploads."""
    here = on_device(wave.cohort.chosen, w.device)
    # Every rank fills in its own clients' rows. Adding zeros does not round, so all
    # ranks mix the same rows in the same order as a single rank would.
    uploads = w.new_zeros(len(wave.order), len(w))
    uploads[here] = received.rows
    uploads = fed.sum(uploads)
    finite = w.new_zeros(len(wave.order))
    finite[here] = received.finite.to(w.dtype)
    finite = fed.sum(finite)
    with fed.timed("aggregate"):
        shares = on_device(fed.options.mixing * wave.weights, w.device)
        shares = shares.to(w.dtype) * finite
        versions = {}
        for number, member in enumerate(wave.order.tolist()):
            # Each version overwrites the upload that it is made of.
            place = uploads[member]
            w = torch.lerp(w, place, shares[member], out=place)
            versions[wave.first + number + 1] = w
        return versions, finite.sum()
