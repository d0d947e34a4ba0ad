"""FedProx (Li et al. 2020): FedAvg whose clients minimise their loss + μ/2 ‖θ − w‖², so
that none goes far from the global row.

With μ = 0 it is FedAvg. In the paper some clients do less work in a round; --partial
does that: on slow devices (--devices) a client does the steps that fit before the
--deadline. Without it all clients train for --epochs.
"""

from hpcfed import options
from hpcfed.clients.pull import Pull, Strengths
from hpcfed.methods import fedavg
from hpcfed.methods._interface import Cohort, Federation
from hpcfed.options import option

EXTENDS = fedavg
PRIVATE_MEAN = True


class Options(options.Options):
    prox_mu: float = option(
        0.01,
        "μ: how strongly w draws clients' rows",
        ge=0,
        also="mu proximal_mu fedprox_mu proximal_term proxy_mu",
    )


def round(
    fed: Federation[Options], state: fedavg.State, cohort: Cohort
) -> fedavg.State:
    w = fed.download(state.w, cohort)
    pull = Pull(Strengths(squared=fed.options.prox_mu), reference=w)
    rows = fed.train(w, cohort, pull=pull)
    rows = fed.upload(rows, cohort)
    return fedavg.State(fed.mean(rows, cohort))
