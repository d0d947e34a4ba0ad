"""FedAvg in clusters of clients with similar data, each with a model of its own; one
cluster is FedAvg.
"""

from hpcfed.methods import Cohort, Federation, _clusters
from hpcfed.methods._clusters import Options, State, aggregate, download

EXTENDS = _clusters


def init(fed: Federation[Options]) -> State:
    return _clusters.begin(fed)


def round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    rows = download(fed, state, cohort)
    rows = fed.train(rows, cohort)
    state, _ = aggregate(fed, state, rows, cohort)
    return state
