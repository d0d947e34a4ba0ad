"""FedAU (Wang & Ji 2024): w ← w + η (1 / N) Σ ωᵢ Δᵢ with N all clients; ωᵢ grows with
the time between participations.

ωᵢ is the mean of the intervals between client i's participations so far, 1 before the
first; an interval ends at the cutoff at the latest. The interval that this
participation ends counts from the next one on. Clients without data are none of the N.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from hpcfed import config
from hpcfed.config import RunConfig, Switch, option
from hpcfed.methods.fedavg import global_row, personal, welcome

if TYPE_CHECKING:
    from torch import Tensor

    from hpcfed.federation.federation import Cohort, Federation

__all__ = ["Options", "State", "global_row", "init", "personal", "round", "welcome"]


class Options(config.Options):
    au_cutoff: int = option(
        50,
        "rounds after which an interval between participations ends at the latest",
        ge=1,
    )
    au_lr: float = option(1.0, "η, the server's learning rate", gt=0)

    def switches(self, config: RunConfig) -> Iterable[Switch]:
        yield from super().switches(config)
        yield Switch(
            "au_cutoff",
            "a --participation below 1",
            config.cohort_size < config.clients,
        )


@dataclass(frozen=True)
class State:
    w: Tensor
    """The global row."""
    omega: Tensor
    """ωᵢ of all clients of the federation, as the two that follow."""
    intervals: Tensor
    """How many have ended."""
    waited: Tensor
    """Rounds since the last one ended."""


def init(fed: Federation) -> State:
    w = fed.initial_row()
    zeros = w.new_zeros(len(fed.sizes))
    return State(w, zeros + 1, zeros, zeros.clone())


def round(fed: Federation, state: State, cohort: Cohort) -> State:
    rows = fed.upload(fed.train(fed.download(state.w, cohort), cohort), cohort)
    w = step(fed, state, rows, cohort.equally(), sampled=len(cohort.clients))
    return counted(fed, replace(state, w=w), cohort)


def step(
    fed: Federation, state: State, rows: Tensor, cohort: Cohort, *, sampled: int
) -> Tensor:
    """w + η (K / N) × the mean of ωᵢ Δᵢ over the cohort, K of whose clients were
    sampled.
    """
    omega = state.omega[cohort.clients[cohort.chosen]]
    mean = fed.mean(omega[:, None] * (rows - state.w), cohort)
    rate = cast(Options, fed.options).au_lr * sampled / max(1, fed.num_holders)
    return state.w + rate * mean


def counted(fed: Federation, state: State, cohort: Cohort) -> State:
    """Every client has waited for one more round; intervals of the sampled end, and
    those as long as the cutoff.
    """
    waited = state.waited + 1
    ended = waited >= cast(Options, fed.options).au_cutoff
    ended[cohort.clients] = True
    mean = (state.intervals * state.omega + waited) / (state.intervals + 1)
    omega = mean.where(ended, state.omega)
    return State(state.w, omega, state.intervals + ended, waited * ~ended)
