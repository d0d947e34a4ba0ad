"""GenFed (Zheng et al. 2025): FedAvg of the ρ_t uploads that do best on the server's
validation set.
"""

from hpcfed.federation.selection import SelectionOptions as Options
from hpcfed.methods.fedavg import State, global_row, init, personal, round, welcome

__all__ = ["Options", "State", "global_row", "init", "personal", "round", "welcome"]
