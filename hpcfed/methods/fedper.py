"""FedPer (Arivazhagan et al. 2019): the body is shared, each client has its own head;
both are trained together.
"""

from hpcfed.methods import Cohort, Federation, _partial
from hpcfed.methods._partial import Options, State, aggregate, body_and_head, download

EXTENDS = _partial


def init(fed: Federation[Options]) -> State:
    body, _ = body_and_head(fed)
    return _partial.begin(fed, shared=body)


def round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    rows = download(fed, state, cohort)
    rows = fed.train(rows, cohort)  # body and head together
    return aggregate(fed, state, rows, cohort)
