"""GenFedAU (Zheng et al. 2025): FedAU over the ρ_t uploads that do best on the server's
validation set.

Read here: w ← w + η (K / ρ_t) (1 / N) Σ ωᵢ Δᵢ over the kept, so that a step is as long
as if all K had been.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from hpcfed.federation.selection import SelectionOptions
from hpcfed.methods import fedau
from hpcfed.methods.fedau import State, global_row, init, personal, welcome

if TYPE_CHECKING:
    from hpcfed.federation.federation import Cohort, Federation

__all__ = ["Options", "State", "global_row", "init", "personal", "round", "welcome"]


class Options(SelectionOptions, fedau.Options):
    pass


def round(fed: Federation, state: State, cohort: Cohort) -> State:
    rows = fed.upload(fed.train(fed.download(state.w, cohort), cohort), cohort)
    rho = cast(Options, fed.options).keep(cohort.round, len(cohort.clients))
    rows, selected = fed.select(rows, cohort.equally(), rho)
    w = fedau.step(fed, state, rows, selected, sampled=len(cohort.clients))
    return fedau.counted(fed, replace(state, w=w), cohort)
