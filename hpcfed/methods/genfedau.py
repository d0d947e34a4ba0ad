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
    rows = fed.download(state.w, cohort)
    rows = fed.train(rows, cohort)
    rows = fed.upload(rows, cohort)
    rows, cohort = fed.arrived(rows, cohort)
    rho = fed.options.rho(cohort.round, len(cohort.clients))
    rows, selected = fed.select(rows, cohort, rho)
    w = fedau.step(fed, state, rows, selected, sampled=cohort)
    # All sampled clients took part, selected or not.
    return fedau.count_round(fed, replace(state, w=w), cohort)
