"""FedAvg-FT: FedAvg, and each client fine-tunes the global model on its own data before
it is judged.

Read here as fine-tuning of the whole model, as long as a round's local training; the
head alone is an option.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

from hpcfed import config
from hpcfed.config import option
from hpcfed.methods.fedavg import State, global_row, init, round, welcome

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from hpcfed.federation.federation import Federation

__all__ = ["Options", "State", "global_row", "init", "personal", "round", "welcome"]


class Options(config.Options):
    finetune_epochs: int | None = option(
        None,
        "epochs of fine-tuning before a client is judged (default: --epochs)",
        ge=0,
        le=100_000,
    )
    finetune: Literal["all", "head"] = option("all", "what fine-tuning may change")


def personal(fed: Federation, state: State, clients: np.ndarray) -> Tensor:
    options = cast(Options, fed.options)
    rows = state.w.expand(len(clients), -1)
    columns = None if options.finetune == "all" else fed.layout.mask([fed.layout.head])
    return fed.finetune(
        rows,
        clients,
        epochs=options.finetune_epochs or fed.config.epochs,
        columns=columns,
    )
