"""FedAvg-FT: FedAvg, and each client fine-tunes the global model on its own data before
it is judged.

Our reading: clients fine-tune the whole model, for as long as a round's local training.
To fine-tune only the head is an option.
"""

from dataclasses import replace
from typing import Literal

from hpcfed import options
from hpcfed.methods import Federation, Layout, Positions, Tensor, fedavg
from hpcfed.options import LocalWork, RunConfig, Training, option

EXTENDS = fedavg
PRIVATE_MEAN = True


class Options(options.Options):
    finetune_epochs: int | None = option(
        None,
        "epochs of fine-tuning before a client is judged (default: --epochs; 0: none)",
        zero=True,
        ge=0,
        le=100_000,
        zero_was_unset=True,
    )
    finetune: Literal["all", "head"] = option("all", "what fine-tuning may change")

    def local_work(self, config: RunConfig, layout: Layout) -> LocalWork:
        judged = Training.usual(config, self.finetune_epochs)
        if self.finetune == "head":
            judged = replace(judged, columns=layout.mask([layout.head]))
        return LocalWork((Training.usual(config),), (judged,))


def personal(
    fed: Federation[Options], state: fedavg.State, clients: Positions
) -> Tensor:
    epochs = fed.options.finetune_epochs
    columns = None
    if fed.options.finetune == "head":
        columns = fed.layout.mask([fed.layout.head])
    # Fine-tuned rows are not kept: the state has only w.
    rows = fedavg.personal(fed, state, clients)
    return fed.finetune(rows, clients, epochs=epochs, columns=columns)
