"""FedAU (Wang & Ji 2024): w ← w + η (1 / N) Σ ωᵢ Δᵢ with N all clients; ωᵢ grows with
the time between participations.

ωᵢ is the mean of the intervals between client i's participations so far, 1 before the
first; an interval ends at the cutoff at the latest. The interval that ends with this
participation counts from the next one on. N does not include clients without data. With
--weights samples, nᵢ / Σn over all clients replaces 1 / N.
"""

from dataclasses import dataclass, replace

from hpcfed import options
from hpcfed.methods import Cohort, Federation, Tensor, fedavg
from hpcfed.options import SAMPLED, option

EXTENDS = fedavg


class Options(options.Options):
    weighs = "uniform"  # ωᵢ replace weights by samples

    au_cutoff: int = option(
        50,
        "rounds after which an interval between participations ends at the latest",
        ge=1,
        needs=SAMPLED,
    )
    au_lr: float = option(1.0, "η, the server's learning rate", gt=0)


@dataclass(frozen=True)
class State(fedavg.State):
    omega: Tensor
    """ωᵢ of all clients of the federation."""
    intervals: Tensor
    """Number of intervals that have ended, of all clients."""
    waited: Tensor
    """Rounds since the last interval ended, of all clients."""


def init(fed: Federation[Options]) -> State:
    w = fed.initial_row()
    # For all clients, and the same on every rank: it is only a few numbers each.
    zeros = w.new_zeros(len(fed.sizes))
    return State(w, omega=zeros + 1, intervals=zeros, waited=zeros.clone())


def round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    rows = fed.download(state.w, cohort)
    rows = fed.train(rows, cohort)
    rows = fed.upload(rows, cohort)
    # Clients that upload too late have not taken part.
    rows, cohort = fed.arrived(rows, cohort)
    w = step(fed, state, rows, cohort, sampled=cohort)
    return count_round(fed, replace(state, w=w), cohort)


def step(
    fed: Federation[Options],
    state: State,
    rows: Tensor,
    cohort: Cohort,
    *,
    sampled: Cohort,
) -> Tensor:
    """Return w + η (K / N) × the mean of ωᵢ Δᵢ over the cohort, with K clients
    `sampled`; with --weights samples, K and N are sums of samples.

    The cohort may be smaller than K if the server has selected some of them.
    """
    ids = cohort.clients[cohort.chosen]
    omega = state.omega[ids]
    updates = omega[:, None] * (rows - state.w)
    mean = fed.mean(updates, cohort)
    # The mean over K clients times K / N is their sum divided by N.
    rate = fed.options.au_lr * fed.weight_of(sampled)
    return state.w + rate * mean


def count_round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    """Return the state after every client has waited for one more round.

    An interval ends if its client was sampled, or if it is as long as the cutoff.
    """
    waited = state.waited + 1
    ended = waited >= fed.options.au_cutoff
    ended[cohort.clients] = True
    # The running mean of the intervals, this one included.
    mean = (state.intervals * state.omega + waited) / (state.intervals + 1)
    return State(
        state.w,
        omega=mean.where(ended, state.omega),
        intervals=state.intervals + ended,
        waited=waited * ~ended,
    )
