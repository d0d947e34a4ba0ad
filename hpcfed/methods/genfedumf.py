"""GenFedUmf (Zheng et al. 2025): FedUmf over the ρ_t uploads that do best on the
server's validation set.
"""

from hpcfed.federation.selection import SelectionOptions
from hpcfed.methods import fedumf
from hpcfed.methods.fedumf import State, global_row, init, personal, round, welcome

__all__ = ["Options", "State", "global_row", "init", "personal", "round", "welcome"]


class Options(SelectionOptions, fedumf.Options):
    pass
