"""FedBABU (Oh et al. 2022): only the body is trained and shared, the head stays random;
clients fine-tune at the end.

All clients have the same head, that of the initial row. Before a client is judged it
fine-tunes the whole model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

from hpcfed.config import option
from hpcfed.methods import _parts
from hpcfed.methods._parts import body_and_head, download, join, upload
from hpcfed.methods.fedper import State, init, welcome

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from hpcfed.federation.federation import Cohort, Federation

__all__ = ["Options", "State", "global_row", "init", "personal", "round", "welcome"]


class Options(_parts.Options):
    finetune_epochs: int = option(
        5, "epochs of fine-tuning before a client is judged", ge=1, le=100_000
    )
    finetune: Literal["all", "head", "body"] = option(
        "all", "what fine-tuning may change"
    )


def round(fed: Federation, state: State, cohort: Cohort) -> State:
    body, _ = body_and_head(fed)
    rows = fed.train(download(fed, state, cohort), cohort, columns=body)
    return upload(fed, state, rows, cohort)


def personal(fed: Federation, state: State, clients: np.ndarray) -> Tensor:
    options, (body, head) = cast(Options, fed.options), body_and_head(fed)
    columns = {"all": None, "head": head, "body": body}[options.finetune]
    rows = _parts.personal(fed, state, clients)
    return fed.finetune(rows, clients, epochs=options.finetune_epochs, columns=columns)


def global_row(state: State) -> Tensor:
    """The body with the head that all clients have in common."""
    return join(state, state.shared, state.own[:1])[0]
