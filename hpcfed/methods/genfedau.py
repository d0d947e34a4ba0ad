"""GenFedAU (Zheng et al. 2025): FedAU over the ρ_t uploads that do best on the server's
validation set.

Read here: w ← w + η (K / ρ_t) (1 / N) Σ ωᵢ Δᵢ over the kept, so that a step is as long
as if all K had been.
"""

from hpcfed.federation.selection import SelectionOptions
from hpcfed.methods import fedau
from hpcfed.methods.fedau import State, global_row, init, personal, round, welcome

__all__ = ["Options", "State", "global_row", "init", "personal", "round", "welcome"]


class Options(SelectionOptions, fedau.Options):
    pass
