"""FedBABU (Oh et al. 2022): only the body is trained and shared, the head stays random;
clients fine-tune at the end.

All clients have the same head, that of the initial row. A client fine-tunes the whole
model before it is evaluated.
"""

from dataclasses import replace
from typing import Literal

from hpcfed.methods import _partial, fedper, no_finals
from hpcfed.methods._interface import Cohort, Federation, Layout, Positions, Tensor
from hpcfed.methods._partial import State, aggregate, body_and_head, download
from hpcfed.options import LocalWork, RunConfig, Training, option

EXTENDS = fedper
PRIVATE_MEAN = True
FINALS = ()
finals = no_finals  # each round's evaluation already fine-tunes


class Options(_partial.Options):
    finetune_epochs: int = option(
        5, "epochs of fine-tuning before a client is judged", ge=1, le=100_000
    )
    finetune: Literal["all", "head", "body"] = option(
        "all", "what fine-tuning may change"
    )

    def local_work(self, config: RunConfig, layout: Layout) -> LocalWork:
        head = layout.mask(layout.last(self.head_layers))
        columns = {"all": None, "head": head, "body": ~head}[self.finetune]
        judged = Training.usual(config, self.finetune_epochs)
        return LocalWork(
            (replace(Training.usual(config), columns=~head),),
            (replace(judged, columns=columns),),
        )


def round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    body, _ = body_and_head(fed)
    rows = download(fed, state, cohort)
    rows = fed.train(rows, cohort, columns=body)
    return aggregate(fed, state, rows, cohort)


def personal(fed: Federation[Options], state: State, clients: Positions) -> Tensor:
    body, head = body_and_head(fed)
    columns = {"all": None, "head": head, "body": body}[fed.options.finetune]
    rows = _partial.personal(fed, state, clients)
    epochs = fed.options.finetune_epochs
    return fed.finetune(rows, clients, epochs=epochs, columns=columns)


def global_row(state: State) -> Tensor:
    """Return the body with the common head of all clients."""
    # Heads are never trained, so any client's will do.
    return _partial.join(state, state.shared, state.private[:1])[0]
