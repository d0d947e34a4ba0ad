"""FedPer (Arivazhagan et al. 2019): the body is shared, each client has its own head;
both are trained together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcfed.methods._parts import (
    Options,
    State,
    begin,
    body_and_head,
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
    body, _ = body_and_head(fed)
    return begin(fed, shared=body)


def round(fed: Federation, state: State, cohort: Cohort) -> State:
    rows = fed.train(download(fed, state, cohort), cohort)
    return upload(fed, state, rows, cohort)
