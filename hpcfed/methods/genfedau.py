"""GenFedAU (Zheng et al. 2025): FedAU over the ρ_t uploads that do best on the server's
validation set.

Our reading: w ← w + η (K / ρ_t) (1 / N) Σ ωᵢ Δᵢ over the selected clients, so that a
step is as long as if all K had been selected.
"""

from dataclasses import replace

from hpcfed.methods import Cohort, Federation, fedau, genfed

EXTENDS = fedau
VALIDATES = True


class Options(genfed.Options, fedau.Options):
    weighs = "uniform"  # as in FedAU


def round(fed: Federation[Options], state: fedau.State, cohort: Cohort) -> fedau.State:
    rows = fed.train(fed.download(state.w, cohort), cohort)
    rows, selected, cohort = genfed.best(fed, rows, cohort)
    w = fedau.step(fed, state, rows, selected, sampled=cohort)
    # All sampled clients took part, selected or not.
    return fedau.count_round(fed, replace(state, w=w), cohort)
