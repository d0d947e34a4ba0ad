"""GenFedUmf (Zheng et al. 2025): FedUmf over the ρ_t uploads that do best on the
server's validation set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from hpcfed.federation.selection import SelectionOptions
from hpcfed.methods import fedumf
from hpcfed.methods.fedumf import State, global_row, init, personal, welcome

if TYPE_CHECKING:
    from hpcfed.federation.federation import Cohort, Federation

__all__ = ["Options", "State", "global_row", "init", "personal", "round", "welcome"]


class Options(SelectionOptions, fedumf.Options):
    pass


def round(fed: Federation, state: State, cohort: Cohort) -> State:
    rows = fed.upload(fedumf.train(fed, state, cohort), cohort)
    rho = cast(Options, fed.options).keep(cohort.round, len(cohort.clients))
    rows, selected = fed.select(rows, cohort, rho)
    return State(fed.mean(rows, selected), state.kept)
