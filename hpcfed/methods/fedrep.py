"""FedRep (Collins et al. 2021): as FedPer, but each client trains its head first, then
the shared body.

The part that is not trained is frozen, and each of the two phases has its own momentum
and order of samples. Read here as one epoch of each; the authors take 10 of the head
and 1 of the body.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, cast

from hpcfed.config import option
from hpcfed.methods import _parts
from hpcfed.methods._parts import body_and_head, download, upload
from hpcfed.methods.fedper import State, global_row, init, personal, welcome

if TYPE_CHECKING:
    from hpcfed.federation.federation import Cohort, Federation

__all__ = ["Options", "State", "global_row", "init", "personal", "round", "welcome"]


class Options(_parts.Options):
    trains_by: ClassVar[Mapping[str, str]] = {"epochs": "body_epochs"}

    head_epochs: int = option(
        1, "epochs of the head, which come first", ge=1, le=100_000
    )
    body_epochs: int = option(1, "epochs of the body, which follow", ge=1, le=100_000)


def round(fed: Federation, state: State, cohort: Cohort) -> State:
    options, (body, head) = cast(Options, fed.options), body_and_head(fed)
    rows = download(fed, state, cohort)
    rows = fed.train(rows, cohort, epochs=options.head_epochs, columns=head)
    rows = fed.train(rows, cohort, epochs=options.body_epochs, columns=body, phase=1)
    return upload(fed, state, rows, cohort)
