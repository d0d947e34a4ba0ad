"""FedPer (Arivazhagan et al. 2019): the body is shared, each client has its own head;
both are trained together.
"""

from collections.abc import Iterator

from hpcfed.methods import Cohort, Federation, Positions, Tensor, _partial
from hpcfed.methods._partial import State, aggregate, body_and_head, download
from hpcfed.options import option

EXTENDS = _partial
PRIVATE_MEAN = True
FINALS: tuple[str, ...] = ("FedPer", "FedPer-FT")


class Options(_partial.Options):
    judge_finetuned: bool = option(
        False,
        "judge all clients at the end before and after one more local training (keeps a "
        "row of every client)",
    )


def init(fed: Federation[Options]) -> State:
    body, _ = body_and_head(fed)
    return _partial.begin(fed, shared=body)


def round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    rows = download(fed, state, cohort)
    rows = fed.train(rows, cohort)  # body and head together
    return aggregate(fed, state, rows, cohort)


def finals(
    fed: Federation[Options], state: State, clients: Positions
) -> Iterator[tuple[str, Tensor]]:
    if fed.options.judge_finetuned:
        rows = _partial.personal(fed, state, clients)
        yield "FedPer", rows
        yield "FedPer-FT", fed.finetune(rows, clients)
