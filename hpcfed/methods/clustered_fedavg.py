"""FedAvg in clusters of clients with similar data, each with a model of its own; one
cluster is FedAvg.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcfed.methods._clusters import (
    Options,
    State,
    begin,
    download,
    global_row,
    personal,
    upload,
    welcome,
)

if TYPE_CHECKING:
    from hpcfed.federation.federation import Cohort, Federation

__all__ = ["Options", "State", "global_row", "init", "personal", "round", "welcome"]


def init(fed: Federation) -> State:
    return begin(fed)


def round(fed: Federation, state: State, cohort: Cohort) -> State:
    rows = fed.train(download(fed, state, cohort), cohort)
    return upload(fed, state, rows, cohort)[0]
