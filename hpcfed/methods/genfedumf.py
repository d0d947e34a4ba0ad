"""GenFedUmf (Zheng et al. 2025): FedUmf over the ρ_t uploads that do best on the
server's validation set.
"""

from hpcfed.methods import Cohort, Federation, fedumf, genfed

EXTENDS = fedumf
VALIDATES = True


class Options(genfed.Options, fedumf.Options):
    pass


def round(
    fed: Federation[Options], state: fedumf.State, cohort: Cohort
) -> fedumf.State:
    # Unsampled clients train as in FedUmf, too: the server never sees their updates.
    rows, selected, _ = genfed.best(fed, fedumf.train(fed, state, cohort), cohort)
    return fedumf.after(fed, state, fed.mean(rows, selected), cohort)
