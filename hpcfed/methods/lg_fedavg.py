"""LG-FedAvg (Liang et al. 2020): the head is shared, each client has its own body; both
are trained together.

Read here as training from scratch; the authors' experiments on images start from a
model that FedAvg has trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcfed.methods._parts import begin, body_and_head
from hpcfed.methods.fedper import Options, State, global_row, personal, round, welcome

if TYPE_CHECKING:
    from hpcfed.federation.federation import Federation

__all__ = ["Options", "State", "global_row", "init", "personal", "round", "welcome"]


def init(fed: Federation) -> State:
    _, head = body_and_head(fed)
    return begin(fed, shared=head)
