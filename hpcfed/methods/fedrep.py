"""FedRep (Collins et al. 2021): as FedPer, but each client trains its head first, then
the shared body.

In each of the two phases the other columns are frozen; each phase has its own momentum
and order of samples. The default is one epoch of each; the authors take 10 of the head
and 1 of the body.
"""

from collections.abc import Iterator
from dataclasses import replace

from hpcfed.methods import _partial, fedper
from hpcfed.methods._interface import Cohort, Federation, Layout, Positions, Tensor
from hpcfed.methods._partial import State, aggregate, body_and_head, download
from hpcfed.options import LocalWork, RunConfig, Training, option

EXTENDS = fedper
PRIVATE_MEAN = True
FINALS = ("FedRep", "FedRep-FT")


class Options(fedper.Options):
    head_epochs: int = option(
        1, "epochs of the head, which come first", ge=1, le=100_000
    )
    body_epochs: int = option(
        1, "epochs of the body, which follow", ge=1, le=100_000, replaces="epochs"
    )

    def local_work(self, config: RunConfig, layout: Layout) -> LocalWork:
        head = layout.mask(layout.last(self.head_layers))
        first = Training.usual(config, self.head_epochs)
        then = Training.usual(config, self.body_epochs)
        return LocalWork((replace(first, columns=head), replace(then, columns=~head)))


def round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    options = fed.options
    body, head = body_and_head(fed)
    rows = download(fed, state, cohort)
    # Two trainings, not one with two masks: momentum of the first phase would still
    # move the frozen columns in the second.
    rows = fed.train(rows, cohort, epochs=options.head_epochs, columns=head)
    rows = fed.train(rows, cohort, epochs=options.body_epochs, columns=body, phase=1)
    return aggregate(fed, state, rows, cohort)


def finals(
    fed: Federation[Options], state: State, clients: Positions
) -> Iterator[tuple[str, Tensor]]:
    options = fed.options
    if not options.judge_finetuned:
        return
    rows = _partial.personal(fed, state, clients)
    yield "FedRep", rows
    # As in a round: the head first, then the body.
    body, head = body_and_head(fed)
    rows = fed.finetune(rows, clients, epochs=options.head_epochs, columns=head)
    rows = fed.finetune(
        rows, clients, epochs=options.body_epochs, columns=body, phase=1
    )
    yield "FedRep-FT", rows
